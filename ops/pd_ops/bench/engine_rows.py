"""What `bench engine` measures and how samples become rows. Pure.

Each *comparison* is measured in rounds; in a round every implementation has its turn, one right after the other, in an
order that rotates. Rates are tokens per second of the process's CPU time (`Clock.CPU`, right with one thread) or of the
wall clock. A rate is the median over the rounds; a ratio is the median of the rounds' own ratios, so that what a busy
machine does to one round it does to both sides of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from pd_ops.bench.measured_process import Document
from pd_ops.tables import table

BATCHES = (1, 4, 16, 64)
PREFILL_TOKENS = (128, 1024, 4096)
DECODE_PROMPT_TOKENS = 16
DECODE_STEPS = {1: 64, 4: 32, 16: 24, 64: 12}  # of one run; any other batch: as the next smaller one
FIRST_ORDINARY_TOKEN = 10  # lower ids are control tokens in the models that are measured


class Kind(Enum):
    DECODE = "decode"
    PREFILL = "prefill"


class Clock(Enum):
    CPU = "cpu"
    WALL = "wall"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One case: prompts of `prompt_tokens`, `batch` of them at once; decoding takes `num_steps` steps a run."""

    kind: Kind
    batch: int
    prompt_tokens: int
    num_steps: int = 0

    @property
    def text(self) -> str:
        if self.kind is Kind.PREFILL:
            return f"prefill {self.prompt_tokens}"
        return f"decode, batch {self.batch}"

    def max_length(self, max_drafts: int) -> int:
        """Tokens of one sequence that are computed at the most: with all drafts accepted at every step."""
        if self.kind is Kind.PREFILL:
            return self.prompt_tokens
        return self.prompt_tokens + (1 + max_drafts) * (self.num_steps + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One implementation's turn in one round."""

    num_tokens: int
    wall_s: float
    cpu_s: float
    parts: Mapping[str, float]

    @classmethod
    def parse(cls, answer: Document) -> Sample:
        return cls(
            num_tokens=answer["num_tokens"], wall_s=answer["wall_s"], cpu_s=answer["cpu_s"], parts=answer["parts"]
        )

    def rate(self, clock: Clock) -> float:
        """Tokens a second."""
        return self.num_tokens / (self.cpu_s if clock is Clock.CPU else self.wall_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Our rate in one case, and a peer's beside it (None without one).

    Attributes:
        dtype: storage of weights and cache, of both sides.
        speculate: draft tokens a step, ours; a peer decodes plainly.
        acceptance: drafts that were accepted, of those that were verified; None without drafts.
        tokens_per_s, peer_tokens_per_s: medians over the rounds.
        ratio: median of the rounds' ratios.
        ratio_low, ratio_high: the lowest and the highest of them.
        rounds: how many.
    """

    model: str
    case: str
    batch: int
    prompt_tokens: int
    dtype: str
    speculate: int
    acceptance: float | None
    tokens_per_s: float
    peer: str | None
    peer_tokens_per_s: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    rounds: int

    def to_json(self) -> Document:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """Where a decode step of ours spends its time, by the wall clock; medians over the rounds.

    Attributes:
        model_share: the forward of the model: main layers, MTP layer, heads.
        outside_share: everything else, `sampling_share` included.
        sampling_share: choosing tokens from the logits.
    """

    model: str
    dtype: str
    batch: int
    speculate: int
    step_ms: float
    model_share: float
    outside_share: float
    sampling_share: float

    def to_json(self) -> Document:
        return asdict(self)


def comparisons(batches: Sequence[int], prefill_tokens: Sequence[int], decode_steps: int | None) -> list[Comparison]:
    """Decoding first. `decode_steps` None: as many as suit the batch."""
    decoding = [
        Comparison(
            kind=Kind.DECODE, batch=batch, prompt_tokens=DECODE_PROMPT_TOKENS,
            num_steps=decode_steps or steps_of_a_run(batch),
        )
        for batch in batches
    ]
    return decoding + [
        Comparison(kind=Kind.PREFILL, batch=1, prompt_tokens=prompt_tokens) for prompt_tokens in prefill_tokens
    ]


def steps_of_a_run(batch: int) -> int:
    return DECODE_STEPS[max(known for known in DECODE_STEPS if known <= batch)]


def prompts_of(comparison: Comparison, vocab_size: int, round_number: int) -> list[list[int]]:
    """Ordinary tokens without a pattern, others in every round; the same for every implementation."""
    span = vocab_size - FIRST_ORDINARY_TOKEN
    state = 2 * (1 + round_number) + 1
    prompts = []
    for _ in range(comparison.batch):
        prompt = []
        for _ in range(comparison.prompt_tokens):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX generator
            prompt.append(FIRST_ORDINARY_TOKEN + (state >> 33) % span)
        prompts.append(prompt)
    return prompts


def row(
    comparison: Comparison, ours: Sequence[Sample], peer: str | None, theirs: Sequence[Sample], *, model: str,
    dtype: str, speculate: int, clock: Clock,
) -> Row:
    """One row from the samples of all rounds; `theirs` has one for each of `ours`, or none."""
    ratios = [mine.rate(clock) / other.rate(clock) for mine, other in zip(ours, theirs, strict=True)] if theirs else []
    return Row(
        model=model, case=comparison.kind.value, batch=comparison.batch, prompt_tokens=comparison.prompt_tokens,
        dtype=dtype, speculate=speculate, acceptance=acceptance(ours),
        tokens_per_s=statistics.median(sample.rate(clock) for sample in ours), peer=peer if theirs else None,
        peer_tokens_per_s=statistics.median(sample.rate(clock) for sample in theirs) if theirs else None,
        ratio=statistics.median(ratios) if ratios else None, ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None), rounds=len(ours),
    )


def acceptance(samples: Sequence[Sample]) -> float | None:
    """Accepted of drafted tokens, over all samples."""
    drafted = sum(sample.parts.get("num_drafted", 0.0) for sample in samples)
    return sum(sample.parts["num_accepted"] for sample in samples) / drafted if drafted else None


def step_row(samples: Sequence[Sample], *, model: str, dtype: str, batch: int, speculate: int) -> StepRow:
    """From samples of decoding by `engine_process`."""
    def median(part: str) -> float:
        return statistics.median(sample.parts[part] / sample.wall_s for sample in samples)

    model_share = median("model_s")
    return StepRow(
        model=model, dtype=dtype, batch=batch, speculate=speculate,
        step_ms=1e3 * statistics.median(sample.wall_s / sample.parts["num_steps"] for sample in samples),
        model_share=model_share, outside_share=1.0 - model_share, sampling_share=median("sampling_s"),
    )


def rows_text(rows: Sequence[Row]) -> str:
    """A table for people: one line a case, a rate and a ratio for each peer."""
    peers = list(dict.fromkeys(row.peer for row in rows if row.peer is not None))
    cases: dict[tuple[str, str, str, int, int, int], dict[str | None, Row]] = {}
    for each in rows:
        key = (each.model, each.dtype, each.case, each.batch, each.prompt_tokens, each.speculate)
        cases.setdefault(key, {})[each.peer] = each
    columns = ("model", "dtype", "case", "batch", "prompt", "drafts", "accepted", "tokens/s")
    lines = []
    for key, by_peer in cases.items():
        first = next(iter(by_peer.values()))
        accepted = "-" if first.acceptance is None else f"{first.acceptance:.2f}"
        lines.append((*key, accepted, f"{first.tokens_per_s:.0f}", *_peer_cells(by_peer, peers)))
    return table((*columns, *(name for peer in peers for name in (peer, "ratio"))), lines)


def steps_text(rows: Sequence[StepRow]) -> str:
    columns = ("model", "dtype", "batch", "drafts", "step", "outside the model", "of it sampling")
    lines = [
        (each.model, each.dtype, each.batch, each.speculate, f"{each.step_ms:.2f} ms", f"{each.outside_share:.1%}",
         f"{each.sampling_share:.1%}")
        for each in rows
    ]
    return table(columns, lines)


def _peer_cells(by_peer: Mapping[str | None, Row], peers: Sequence[str]) -> list[str]:
    cells = []
    for peer in peers:
        found = by_peer.get(peer)
        if found is None or found.peer_tokens_per_s is None or found.ratio is None:
            cells += ["-", "-"]
        else:
            cells += [f"{found.peer_tokens_per_s:.0f}", f"{found.ratio:.2f}"]
    return cells
