"""Signals as events: the first asks, the second insists."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

from pd_ops.cluster.interrupts import Interrupts, interruptible, uninterrupted, unless


async def forever() -> None:
    await asyncio.Event().wait()


async def test_the_first_signal_and_the_second() -> None:
    interrupts = Interrupts()
    os.kill(os.getpid(), signal.SIGTERM)
    await interrupts.first.wait()
    assert not interrupts.second.is_set()
    os.kill(os.getpid(), signal.SIGINT)
    await interrupts.second.wait()


async def test_work_that_an_event_cuts_short() -> None:
    event, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    waiting = asyncio.ensure_future(unless(event, work()))
    await asyncio.sleep(0)
    event.set()
    assert await waiting is None
    assert cancelled.is_set()


async def test_work_that_ends_first() -> None:
    async def work(result: int) -> int:
        return result

    async def fail() -> None:
        raise ValueError("its own error")

    assert await unless(asyncio.Event(), work(5)) == 5
    with pytest.raises(ValueError, match="its own error"):
        await unless(asyncio.Event(), fail())


def test_sigterm_runs_finally() -> None:
    script = (
        "import os, signal\n"
        "from pd_ops.cluster.interrupts import interruptible\n"
        "try:\n"
        "    with interruptible():\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('cleaned up')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "cleaned up\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_swallowed_is_remembered(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interruptible() as interruption:
        interruption.check()
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
            signal.pause()
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
    assert signal.getsignal(number) is before


def test_an_ending_is_not_interrupted() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
