"""Nothing stays behind: blocks, leases, pins, streams, file descriptors, threads and child processes are back at
their baseline."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
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


@asynccontextmanager
async def assert_nothing_left(*, except_files: str | None = None) -> AsyncIterator[None]:
    """Around everything that a test starts and stops in its event loop.

    What is about to close gets time to: gRPC closes sockets in threads of its own, and an asynchronous generator that
    nobody refers to any more, or that the collector finds, is closed by a task of the loop, and holds all that its
    frame refers to until then: gRPC leaves those of cut streams to this.

    Args:
        except_files: part of the name of files that a fixture may still refer to.
    """
    grpc.aio.init_grpc_aio()  # its wake-up sockets live as long as the process
    resource_tracker.ensure_running()  # so does the helper of multiprocessing
    before = _resources()
    yield
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_S):
            while _resources().beyond(before, except_files):
                gc.collect()
                await asyncio.sleep(0.002)
    left = _resources().beyond(before, except_files)
    assert not left, f"left behind: {left}"


@dataclass(frozen=True, kw_only=True)
class _Resources:
    files: frozenset[str]
    children: frozenset[int]
    threads: frozenset[str]

    def beyond(self, before: _Resources, except_files: str | None) -> list[str]:
        """What there is more, by name."""
        files = [name for name in self.files - before.files if except_files is None or except_files not in name]
        children = [f"child process {pid}" for pid in self.children - before.children]
        threads = [name for name in self.threads - before.threads if not _is_shared(name)]
        return sorted([*files, *children, *threads])


def _resources() -> _Resources:
    return _Resources(
        files=frozenset(_open_files()),
        children=frozenset(child.pid for child in psutil.Process().children(recursive=True)),
        threads=frozenset(f"{thread.name}-{thread.ident}" for thread in threading.enumerate()),
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
