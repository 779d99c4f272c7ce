"""Nothing stays behind: blocks, leases, pins, streams, file descriptors, threads and child processes are back at
their baseline."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import grpc.aio
import psutil

from pd_engine.cache.blocks import BlockPool

CLOSING_S = 5.0


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that tells nobody when it happens; bounded by the test's own timeout."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def assert_pool_is_free(pool: BlockPool) -> None:
    """Every block is free or kept by a prefix cache, which is the same, and the pool's books are right."""
    pool.check_integrity()
    assert pool.num_quarantined == 0, f"{pool.num_quarantined} blocks are in quarantine"
    assert pool.num_free == pool.num_blocks, f"blocks are still held: {pool.holdings()}"


@contextmanager
def assert_no_leaks(*, except_files: str | None = None) -> Iterator[None]:
    """Around everything that a test starts and stops.

    Args:
        except_files: part of the name of files that a fixture may still refer to.
    """
    grpc.aio.init_grpc_aio()  # its wake-up sockets live as long as the process
    resource_tracker.ensure_running()  # so does the helper of multiprocessing
    before = _resources()
    yield
    after = _resources()
    if after.files - before.files:
        gc.collect()  # what only a reference cycle keeps is no leak
        after = _resources()
    new_files = {name for name in after.files - before.files if except_files is None or except_files not in name}
    assert not new_files, f"open files were left behind: {sorted(new_files)}"
    assert not after.children - before.children, f"child processes were left: {after.children - before.children}"
    new_threads = {name for name in after.threads - before.threads if not _is_shared(name)}
    assert not new_threads, f"threads were left behind: {sorted(new_threads)}"


@asynccontextmanager
async def assert_nothing_left() -> AsyncIterator[None]:
    """`assert_no_leaks` around what runs in this event loop.

    An asynchronous generator that nobody refers to any more, or that the collector finds, is closed by a task of the
    loop, and holds all that its frame refers to until then: gRPC leaves those of cut streams to this. So the loop gets
    time to do it.
    """
    with assert_no_leaks():
        before = set(_open_files())
        yield
        with contextlib.suppress(TimeoutError):  # the check tells what is still there
            async with asyncio.timeout(CLOSING_S):
                while set(_open_files()) - before:
                    gc.collect()
                    await asyncio.sleep(0.002)


class _Resources:
    def __init__(self, files: set[str], children: set[int], threads: set[str]) -> None:
        self.files = files
        self.children = children
        self.threads = threads


def _resources() -> _Resources:
    return _Resources(
        files=set(_open_files()),
        children={child.pid for child in psutil.Process().children(recursive=True)},
        threads={f"{thread.name}-{thread.ident}" for thread in threading.enumerate()},
    )


def _open_files() -> Iterator[str]:
    """Sockets, pipes and memory files by number and what they are; those of libraries that keep them are left out."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:", "/memfd:", "/")) and not target.startswith(("/proc", "/dev", "/sys")):
            yield f"{entry.name} -> {target}"


def _is_shared(thread: str) -> bool:
    return thread.startswith(("asyncio_", "ThreadPoolExecutor", "MainThread"))
