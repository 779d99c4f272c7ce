"""Medians of GPU time by CUDA events, and the two ceilings that they are held against.

Calls on different inputs are captured in a graph and replayed, so that neither launches nor a warm cache are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[], object]
CALLS_A_GRAPH = 16
SECONDS_A_CASE = 0.4
MIN_REPLAYS, MAX_REPLAYS = 5, 50
COPY_BYTES = 4 << 30
MATMUL_WIDTH = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        median_us: of the replays.
        spread: (slowest - fastest) / median; a difference between two figures below it is noise.
        num_replays: of a graph with `calls_a_replay` calls.
    """

    median_us: float
    spread: float
    num_replays: int
    calls_a_replay: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Measured on this GPU in this run: bytes/s of a copy (reads and writes counted), FLOP/s of a bf16 product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure(calls: Sequence[Call], device: torch.device) -> Timing:
    """One call's time. On the CPU, where kernels are interpreted, a wall-clock time of two that means nothing."""
    if device.type != "cuda":
        calls = calls[:2]
        start_s = time.perf_counter()
        for call in calls:
            call()
        return Timing(median_us=1e6 * (time.perf_counter() - start_s) / len(calls), spread=0.0, num_replays=1,
                      calls_a_replay=len(calls))
    graph, num_calls = _capture(calls)
    graph.replay()
    torch.cuda.synchronize()
    times_us: list[float] = []
    began_s = time.perf_counter()
    while len(times_us) < MIN_REPLAYS or (
        len(times_us) < MAX_REPLAYS and time.perf_counter() - began_s < SECONDS_A_CASE
    ):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_us.append(1e3 * start.elapsed_time(end) / num_calls)
    median_us = statistics.median(times_us)
    return Timing(median_us=median_us, spread=(max(times_us) - min(times_us)) / median_us, num_replays=len(times_us),
                  calls_a_replay=num_calls)


def _capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls in turn, and how many calls it has: few where one takes long."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles what is not compiled yet
            call()
        stream.synchronize()
        began_s = time.perf_counter()
        calls[0]()
        stream.synchronize()
        took_s = time.perf_counter() - began_s
    torch.cuda.current_stream().wait_stream(stream)
    rounds = max(1, min(CALLS_A_GRAPH, int(0.02 / max(took_s, 1e-6))) // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def measure_ceilings(device: torch.device) -> Ceilings:
    """On random data: zeros would run faster."""
    if device.type != "cuda":
        return Ceilings(copy_bytes_per_s=1.0, matmul_flops_per_s=1.0)
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure([partial(target.copy_, source)], device)
    del source, target
    a, b = (torch.randn(MATMUL_WIDTH, MATMUL_WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = measure([partial(torch.matmul, a, b)], device)
    return Ceilings(copy_bytes_per_s=2 * COPY_BYTES / copy.median_us * 1e6,
                    matmul_flops_per_s=2 * MATMUL_WIDTH**3 / product.median_us * 1e6)
