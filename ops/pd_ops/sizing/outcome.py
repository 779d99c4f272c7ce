"""Requests as they travel through a simulation, and what became of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pd_engine.hashing import HASH_BYTES
from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.record import Record
from pd_ops.bench.serve.summary import percentile
from pd_ops.bench.serve.traced import TracedRequest
from pd_ops.sizing.cache import Prompt
from pd_ops.sizing.histogram import Histogram
from pd_router.pools import PlacementRequest
from pd_router.targets import Targets


@dataclass(eq=False, slots=True)
class Traveller:
    """One request.

    Attributes:
        prompt: that has to be computed next: after a decode worker has died, with the tokens that it has.
        num_left: tokens to generate. num_again: generated ones that are part of the prompt now.
        ending: "finished", "refused" or "failed"; empty: it travels.
        number: of its latest placement.
    """

    arrival_s: float
    prompt: Prompt
    num_output: int
    num_left: int
    num_again: int = 0
    wanted: PlacementRequest | None = None
    targets: Targets | None = None
    number: int = -1
    prefill_worker: str = ""
    decode_worker: str = ""
    first_s: float = math.inf
    last_token_s: float = 0.0
    end_s: float = 0.0
    num_cached: int = 0
    ending: str = ""

    @property
    def num_prompt(self) -> int:
        """Of its own prompt, without what it has lost and computes again."""
        return self.prompt.num_tokens - self.num_again

    @property
    def num_slots(self) -> int:
        return self.prompt.num_tokens + self.num_left

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first_s - self.arrival_s)

    @property
    def mean_itl_ms(self) -> float:
        return 1e3 * (self.end_s - self.first_s) / max(1, self.num_output - 1)

    def note_first(self, at_s: float, num_cached: int) -> None:
        """A token came of a prompt: the first one, or the next after a loss."""
        if self.first_s == math.inf:
            self.first_s, self.num_cached = at_s, num_cached
        self.last_token_s = at_s
        self.num_left -= 1

    def lose(self, num_tokens: int) -> None:
        """Its decode worker, after so many tokens more: they are part of its prompt now."""
        num_had = self.num_output - self.num_left + min(num_tokens, self.num_left - 1)
        before = self.num_output - self.num_left
        self.num_again += num_had - before
        self.num_left = self.num_output - num_had
        self.prompt = replace(self.prompt, num_tokens=self.prompt.num_tokens + num_had - before)


@dataclass(eq=False, slots=True)
class Totals:
    """`num_moved`: placements that a failure ended."""

    itl_ms: Histogram = field(default_factory=Histogram)
    num_steps: int = 0
    num_step_sequences: int = 0
    num_local: int = 0
    num_moved: int = 0

    def note_step(self, size: int) -> None:
        self.num_steps += 1
        self.num_step_sequences += size

    def add(self, other: Totals) -> None:
        """Those of workers that had nothing to do with these."""
        self.itl_ms.merge(other.itl_ms)
        self.num_steps += other.num_steps
        self.num_step_sequences += other.num_step_sequences
        self.num_local += other.num_local
        self.num_moved += other.num_moved


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    travellers: tuple[Traveller, ...]
    totals: Totals
    span_s: float
    prefill_busy_s: float
    decode_busy_s: float

    def summary(self, *, prefill: int, decode: int, ttft_ms: float | None, itl_ms: float | None) -> Document:
        """The documented keys.

        Args:
            ttft_ms, itl_ms: what a good request keeps within, the second on average.
        """
        finished = [one for one in self.travellers if one.ending == "finished"]
        good = sum(
            (ttft_ms is None or one.ttft_ms <= ttft_ms) and (itl_ms is None or one.mean_itl_ms <= itl_ms)
            for one in finished
        )
        window_s = self.travellers[-1].arrival_s - self.travellers[0].arrival_s or self.span_s  # all at one moment
        prompt_tokens = sum(one.num_prompt for one in finished)
        totals, workers = self.totals, prefill + decode
        return {
            "prefill": prefill, "decode": decode, "requests": len(self.travellers), "finished": len(finished),
            "refused": sum(one.ending == "refused" for one in self.travellers),
            "failed": sum(one.ending == "failed" for one in self.travellers),
            "prompt_tokens": prompt_tokens, "completion_tokens": sum(one.num_output for one in finished),
            "good": good, "good_share": good / len(self.travellers),
            "goodput_per_s": good / window_s if window_s > 0 else 0.0, "span_s": self.span_s,
            "ttft_ms": _spread([one.ttft_ms for one in finished]),
            "itl_ms": {"p50": totals.itl_ms.percentile(0.5), "p99": totals.itl_ms.percentile(0.99)},
            "request_itl_ms": _spread([one.mean_itl_ms for one in finished if one.num_output > 1]),
            "cached_share": sum(one.num_cached for one in finished) / prompt_tokens if prompt_tokens else 0.0,
            "prefill_busy_share": self.prefill_busy_s / (prefill * self.span_s) if prefill and self.span_s else 0.0,
            "decode_busy_share": self.decode_busy_s / (decode * self.span_s) if decode and self.span_s else 0.0,
            "mean_batch": totals.num_step_sequences / totals.num_steps if totals.num_steps else 0.0,
            "worker_s_per_request": workers * self.span_s / len(finished) if finished else None,
            "local": totals.num_local, "moved": totals.num_moved,
        }


def _spread(values: Sequence[float]) -> Document:
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p99": None}
    return {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99)}


def travellers_of(requests: Sequence[TracedRequest]) -> list[Traveller]:
    """Of a trace: with the hashes of their full blocks."""
    found = []
    for request in requests:
        num_full = request.prompt_tokens // request.block_tokens
        hashes = tuple((block % 2**63).to_bytes(HASH_BYTES, "little") for block in request.prefix[:num_full])
        prompt = Prompt(num_tokens=request.prompt_tokens, hashes=hashes)
        found.append(Traveller(request.arrival_s, prompt, request.output_tokens, request.output_tokens))
    return found


def replayed(records: Sequence[Record]) -> list[Traveller]:
    """The requests of a measurement, at the times when they were due, with as many tokens cached as it told."""
    return [
        Traveller(
            record.intended_s, Prompt(num_tokens=record.prompt_tokens, given_cached=record.num_cached_tokens or 0),
            record.asked_tokens, record.asked_tokens,
        )
        for record in sorted(records, key=lambda one: one.intended_s)
    ]
