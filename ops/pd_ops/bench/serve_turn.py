"""One run of `bench serve` as a process of its own, ended after a time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pd_engine.errors import FailedPrecondition

WARM_UP = ("--requests", "8", "--concurrency", "4", "--kind", "short", "--length-scale", "0.3")
INTERRUPT_GRACE_S = 30.0
EXIT_INTERRUPTED = 130


async def serve_turn(flags: Sequence[str], log: Path, limit_s: float) -> None:
    """Interrupted after `limit_s`: it keeps what it has measured.

    Raises:
        FailedPrecondition: it failed; `log` says why.
    """
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pd_ops.cli", "bench", "serve", *flags, stdin=asyncio.subprocess.DEVNULL, stdout=out,
            stderr=out, start_new_session=True,
        )
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await process.wait()
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERRUPT_GRACE_S):
                    await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode not in (0, EXIT_INTERRUPTED):
        raise FailedPrecondition(f"bench serve ended with {process.returncode}: see {log.name} in {log.parent}")
