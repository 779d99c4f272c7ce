"""What a worker says of itself."""

from __future__ import annotations

import functools
import mmap
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from pd_engine.cache.events import CacheLog
from pd_engine.cache.prefix import PrefixCache
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.sampling.params import MAX_SPECULATE
from pd_engine.service.memory import audit
from pd_engine.service.requests import Limits

if TYPE_CHECKING:
    from pd_engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerAddress:
    """Where a worker answers, "host:port", and in which life: 32 hexadecimal digits, new with every start."""

    address: str
    epoch: str


def max_speculate(settings_speculate: int) -> int:
    """The most draft tokens a step that a worker takes: any request's number, or none where the setting is 0."""
    return MAX_SPECULATE if settings_speculate else 0


def limits_of(engine: Engine) -> Limits:
    return Limits(
        vocab_size=engine.config.vocab_size,
        max_context_length=engine.max_context_length,
        block_size=engine.layout.block_size,
        max_speculate=MAX_SPECULATE if engine.has_mtp else 0,
    )


def prefix_cache(engine: Engine, log: CacheLog, *, is_on: bool) -> PrefixCache | None:
    """Of this engine's blocks; None if the settings turn it off. In the expanded form of prefill the positions of a
    prompt and generated ones differ in their last bits, so only prompts are shared then."""
    if not is_on:
        return None
    return PrefixCache(
        engine.pool, fingerprint=engine.fingerprint, block_size=engine.layout.block_size,
        prompts_only=engine.expand_prompts, log=log,
    )


def worker_info(
    engine: Engine, *, worker_id: str, role: str, epoch: str, transports: Sequence[str], start_cost: StartCost,
    lifeline_port: int,
) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        fingerprint=engine.fingerprint,
        layout_version=engine.layout.version,
        block_size=engine.layout.block_size,
        num_blocks_total=engine.pool.num_blocks,
        bytes_per_token=engine.layout.bytes_per_token,
        dtype=engine.dtype,
        max_speculate=MAX_SPECULATE if engine.has_mtp else 0,
        max_context_length=engine.max_context_length,
        pid=os.getpid(),
        host=socket.gethostname(),
        weights_bytes=engine.weights_bytes,
        arena_bytes=engine.arena.num_bytes,
        ops_backend=engine.ops.name,
        load_seconds=start_cost.seconds,
        load_cpu_seconds=start_cost.cpu_seconds,
        transports=transports,
        num_parameters=engine.num_parameters,
        lifeline_port=lifeline_port,
    )


def memory_of(engine: Engine, *, host_cache_bytes: int) -> pb.MemoryAudit:
    """What a worker's process takes now. `host_cache_bytes`: of sequences that wait for blocks."""
    return audit(
        weights_bytes=engine.weights_bytes, arena_bytes=engine.arena.num_bytes, host_cache_bytes=host_cache_bytes
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StartCost:
    """Of a worker, from the start of its process to ready.

    Attributes:
        cpu_seconds: of all its threads: what other processes on the host change less than `seconds`.
    """

    seconds: float
    cpu_seconds: float


def start_cost() -> StartCost:
    """Of this process, ready now."""
    age_s = time.time() - psutil.Process().create_time()
    return StartCost(seconds=max(0.0, age_s), cpu_seconds=time.process_time())


def rss_bytes() -> int:
    """Asked with every load report: it opens nothing, as whoever reports nothing counts as lost, and this process may
    have as many files open as it may."""
    return int(os.pread(_statm(os.getpid()), 256, 0).split()[1]) * mmap.PAGESIZE


@functools.lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """A descriptor for as long as the process lives."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
