"""What `pd-relay demo` asks, and the table it ends with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.text.defaults import SamplingFields
from pd_ops.latency import LatencySummary, StreamTiming, summarize
from pd_ops.output import Document
from pd_ops.request_options import TextPrompt
from pd_ops.tables import mib, milliseconds, table
from pd_ops.verification.outcome import Outcome
from pd_ops.verification.remote import Request

NUM_CONCURRENT = 12
MAX_NEW_TOKENS = 48
TEMPERATURE = 0.7

# In the language of what the shipped checkpoint has read.
PROMPTS = (
    "The function returns a list of",
    "An exception is raised if the file does not exist. Otherwise",
    "This module provides a simple interface to the",
    "A dictionary maps keys to values. The keys must be hashable, and two keys that compare equal are the same key. To "
    "iterate over a dictionary in order of its keys,",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRequest:
    text: str
    request: Request


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """One request: what came, when, and what differs from one process (None: nothing)."""

    outcome: Outcome
    timing: StreamTiming
    accepted_tokens: int
    drafted_tokens: int
    difference: str | None


def shown_requests() -> list[DemoRequest]:
    """Those whose answers are streamed for people to see, one after the other."""
    return [_request(text, seed) for seed, text in enumerate(PROMPTS[:3], start=1)]


def concurrent_requests() -> list[DemoRequest]:
    """Those that run at the same time: from a few tokens to a few hundred."""
    return [
        _request(" ".join(PROMPTS * (number // len(PROMPTS) * 2) + (PROMPTS[number % len(PROMPTS)],)), 100 + number)
        for number in range(NUM_CONCURRENT)
    ]


def _request(text: str, seed: int) -> DemoRequest:
    sampling = SamplingFields(temperature=TEMPERATURE, seed=seed, max_tokens=MAX_NEW_TOKENS, logprobs=1)
    return DemoRequest(text=text, request=Request(prompt=TextPrompt(text=text, add_bos=True), sampling=sampling))


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """All requests of a demonstration.

    Attributes:
        bytes_per_token: cache bytes of one slot, MTP's layer included.
        total_rss_bytes: of the cluster, Ray included.
        ready_seconds, seconds: from the start of the command until the cluster served, and until the end.
    """

    results: tuple[DemoResult, ...]
    bytes_per_token: int
    total_rss_bytes: int
    ready_seconds: float
    seconds: float

    @property
    def num_identical(self) -> int:
        return sum(result.difference is None for result in self.results)

    @property
    def ttft(self) -> LatencySummary:
        return summarize([ms for result in self.results if (ms := result.timing.ttft_ms) is not None])

    @property
    def itl(self) -> LatencySummary:
        return summarize([ms for result in self.results for ms in result.timing.itl_ms])

    def to_json(self) -> Document:
        prompt_tokens, tokens, accepted, drafted, moved = self._totals()
        return {
            "requests": len(self.results), "prompt_tokens": prompt_tokens, "completion_tokens": tokens,
            "ttft": self.ttft.to_json(), "itl": self.itl.to_json(),
            "accepted_tokens": accepted, "drafted_tokens": drafted,
            "handoff_bytes": moved, "expected_handoff_bytes": self._expected_bytes(),
            "bytes_per_token": self.bytes_per_token, "total_rss_bytes": self.total_rss_bytes,
            "ready_seconds": round(self.ready_seconds, 3), "seconds": round(self.seconds, 3),
            "identical": self.num_identical, "differences": self._differences(),
        }

    def to_text(self) -> str:
        prompt_tokens, tokens, accepted, drafted, moved = self._totals()
        expected = self._expected_bytes()
        sign, word = ("=", "as expected") if moved == expected else ("!=", f"EXPECTED {expected}")
        rows: Sequence[tuple[str, str]] = (
            ("requests", str(len(self.results))),
            ("tokens", f"{prompt_tokens} read, {tokens} written"),
            ("TTFT (time to first token)", _latency_text(self.ttft)),
            ("ITL (time a token after it)", _latency_text(self.itl)),
            ("drafts accepted", f"{accepted} of {drafted}" + (f" ({accepted / drafted:.0%})" if drafted else "")),
            ("handed over", f"{moved} bytes {sign} {self._num_slots()} slots x {self.bytes_per_token} bytes: {word}"),
            ("memory", f"{mib(self.total_rss_bytes)} in all processes, Ray included"),
            ("ready / all", f"{self.ready_seconds:.1f} s / {self.seconds:.1f} s"),
        )
        lines = [table(("measure", "value"), rows), *self._differences()]
        return "\n".join([*lines, f"identical to monolithic: {self.num_identical} of {len(self.results)}"])

    def _totals(self) -> tuple[int, int, int, int, int]:
        """Prompt tokens, generated tokens, accepted and verified drafts, bytes that were handed over."""
        return (
            sum(result.outcome.num_prompt_tokens for result in self.results),
            sum(len(result.outcome.token_ids) for result in self.results),
            sum(result.accepted_tokens for result in self.results),
            sum(result.drafted_tokens for result in self.results),
            sum(result.outcome.handoff_bytes or 0 for result in self.results),
        )

    def _num_slots(self) -> int:
        """Slots that had to be handed over: a request that ends with its first token needs none."""
        return sum(
            result.outcome.num_prompt_tokens for result in self.results
            if len(result.outcome.token_ids) > 1 or result.outcome.handoff_bytes is not None
        )

    def _expected_bytes(self) -> int:
        return self._num_slots() * self.bytes_per_token

    def _differences(self) -> list[str]:
        return [
            f"request {number}: {result.difference}"
            for number, result in enumerate(self.results) if result.difference is not None
        ]


def _latency_text(summary: LatencySummary) -> str:
    return f"p50 {milliseconds(summary.p50_ms)}, p99 {milliseconds(summary.p99_ms)}"
