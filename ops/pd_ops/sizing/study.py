"""Several sets of pools under one load: which of them are worth their workers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pd_engine.errors import InvalidArgument
from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.cost import MILLION, SECONDS_AN_HOUR
from pd_ops.bench.serve.result import Result
from pd_ops.bench.serve.summary import Targets
from pd_ops.sizing.cells import play
from pd_ops.sizing.cost_model import CostModel
from pd_ops.sizing.outcome import Traveller
from pd_ops.sizing.pools import Failure, Pools

MAX_WORKERS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Attributes:
    travellers: makes the load anew: a simulation uses it up.
    pools: but for how many workers each has.
    cell_workers: of more workers than that, about so many play together; None: all of them, always.
    """

    cost: CostModel
    travellers: Callable[[], list[Traveller]]
    pools: Pools
    failures: tuple[Failure, ...] = ()
    seed: int = 0
    cell_workers: int | None = None

    def failures_of(self, prefill: int, decode: int) -> tuple[Failure, ...]:
        """Of workers that such pools have."""
        workers = {f"prefill-{n}" for n in range(prefill)} | {f"decode-{n}" for n in range(decode)}
        return tuple(failure for failure in self.failures if failure.worker_id in workers)

    def row(self, prefill: int, decode: int, *, with_failures: bool) -> Document:
        """The summary of one simulation, and which workers died in it, before all requests had ended."""
        failures = self.failures_of(prefill, decode) if with_failures else ()
        pools = replace(self.pools, prefill=prefill, decode=decode)
        num_cells = 1 if self.cell_workers is None else math.ceil((prefill + decode) / self.cell_workers)
        outcome = play(
            pools, self.cost, self.travellers(), num_cells=num_cells, seed=self.seed, failures=failures
        )
        return {
            **outcome.summary(prefill=prefill, decode=decode, ttft_ms=pools.ttft_target_ms, itl_ms=pools.itl_target_ms),
            "died": [failure.worker_id for failure in failures if failure.at_s <= outcome.span_s],
            "cells": num_cells,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Of a device for an hour, and how many devices a worker of each pool has."""

    device_hour: float
    prefill_devices: int = 1
    decode_devices: int = 1

    def of(self, row: Document) -> Document:
        """What the pools' devices cost for a million tokens: of input the prefill pool's, of output the decode pool's
        (decision 0244), for as long as requests came and were served. None: no tokens."""
        hours = row["span_s"] / SECONDS_AN_HOUR
        prefill = row["prefill"] * self.prefill_devices * hours * self.device_hour
        decode = row["decode"] * self.decode_devices * hours * self.device_hour
        good_requests = row["good"] or None
        return {
            "device_hours": (row["prefill"] * self.prefill_devices + row["decode"] * self.decode_devices) * hours,
            "per_million_input": MILLION * prefill / row["prompt_tokens"] if row["prompt_tokens"] else None,
            "per_million_output": MILLION * decode / row["completion_tokens"] if row["completion_tokens"] else None,
            "per_thousand_good_requests": 1e3 * (prefill + decode) / good_requests if good_requests else None,
        }


def parse_pools(text: str) -> tuple[int, int]:
    """Raises:
    InvalidArgument: it is not P:D, with a decode worker at least.
    """
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text)
    if match is None or int(match[2]) < 1 or int(match[1]) + int(match[2]) > MAX_WORKERS:
        raise InvalidArgument(
            f"--pools must be P:D, such as 1:3, with a decode worker at least and {MAX_WORKERS} in all at most, got "
            f"{text[:40]!r}"
        )
    return int(match[1]), int(match[2])


def parse_failure(text: str, *, back_after_s: float) -> Failure:
    """Raises:
    InvalidArgument: it is not WORKER@SECONDS.
    """
    match = re.fullmatch(r"((?:prefill|decode)-[0-9]{1,4})@([0-9]{1,9}(?:\.[0-9]{1,6})?)", text)
    if match is None:
        raise InvalidArgument(f"--fail must be WORKER@SECONDS, such as decode-0@60, got {text[:40]!r}")
    return Failure(worker_id=match[1], at_s=float(match[2]), back_after_s=back_after_s)


def front(rows: Sequence[Document]) -> list[bool]:
    """Of each row, whether no other one is as good in all of these and better in one: fewer workers, more goodput,
    lower p99 of first tokens and of times between tokens. Rows with dead workers are not on it."""
    points = [None if row.get("died") else _point(row) for row in rows]
    return [
        point is not None and not any(
            all(mine <= his for mine, his in zip(other, point, strict=True)) and other != point
            for other in points if other is not None
        )
        for point in points
    ]


def _point(row: Document) -> tuple[float, ...]:
    """Less is better."""
    return (row["prefill"] + row["decode"], -row["goodput_per_s"], _or_worst(row["ttft_ms"]["p99"]),
            _or_worst(row["itl_ms"]["p99"]))


def _or_worst(value: float | None) -> float:
    """Where nothing finished."""
    return math.inf if value is None else value


def best_ratios(rows: Sequence[Document]) -> list[Document]:
    """Where several ratios of as many workers were played, the one with the most good requests; of equals the one with
    the lower p99 of first tokens. Rows with dead workers do not count."""
    found = []
    alive = [row for row in rows if not row["died"]]
    for workers in sorted({row["prefill"] + row["decode"] for row in alive}):
        mine = [row for row in alive if row["prefill"] + row["decode"] == workers]
        if len(mine) > 1:
            best = min(mine, key=lambda row: (-row["good"], _or_worst(row["ttft_ms"]["p99"])))
            found.append({"workers": workers, "of": len(mine), **{
                name: best[name] for name in ("prefill", "decode", "good_share")
            }})
    return found


def compared(rows: Sequence[Document], result: Result, pools: Pools) -> list[Document] | None:
    """What was simulated beside what was measured: name, both, and their ratio (null without one). Both are good by
    the simulation's targets. None: pools as they were measured have not been played."""
    topology = result.identity.get("topology") or {}
    measured = tuple(topology.get(role) or 0 for role in ("prefill", "decode"))
    row = next((row for row in rows if (row["prefill"], row["decode"]) == measured and not row["died"]), None)
    if row is None:
        return None
    targets = Targets(ttft_ms=pools.ttft_target_ms, itl_ms=pools.itl_target_ms)
    good = sum(targets.are_met(record) for record in result.records) / max(1, len(result.records))
    found = [
        _pair(f"{name} {rank}", result.summary[name][rank], row[name][rank])
        for name in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")
    ]
    return [*found, _pair("good_share", good, row["good_share"])]


def _pair(name: str, measured: float | None, simulated: float | None) -> Document:
    ratio = simulated / measured if measured and simulated is not None else None
    return {"name": name, "measured": measured, "simulated": simulated, "ratio": ratio}
