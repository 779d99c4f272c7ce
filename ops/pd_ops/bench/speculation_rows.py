"""What drafts are worth in `bench engine`, beside what their parts measured alone allow. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pd_ops.bench.engine_rows import Clock, Sample, acceptance
from pd_ops.bench.measured_process import Document
from pd_ops.tables import table


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationRow:
    """What drafts are worth beside what their parts allow; medians over the rounds.

    Attributes:
        acceptance: drafts that were accepted, of those that were verified.
        tokens_per_step: of a sequence.
        plain_ms, verify_ms, draft_ms: a step without drafts, a step that verifies drafts made beforehand, and drafting,
            each measured alone.
        step_verify_ms, step_draft_ms: the last two as they are in a step with drafts: dearer where each finds what the
            other has left in the processor's caches.
        speedup: tokens a second with drafts over those without.
        possible: tokens_per_step x plain / (verify + draft).
        share: speedup / possible.
    """

    model: str
    dtype: str
    batch: int
    speculate: int
    acceptance: float
    tokens_per_step: float
    plain_ms: float
    verify_ms: float
    draft_ms: float
    step_verify_ms: float
    step_draft_ms: float
    speedup: float
    possible: float
    share: float

    def to_json(self) -> Document:
        return asdict(self)


def speculation_row(
    drafting: Sequence[Sample], plain: Sequence[Sample], *, model: str, dtype: str, batch: int, speculate: int,
    clock: Clock,
) -> SpeculationRow | None:
    """From samples of the same rounds of `engine_process`; None where nothing was drafted."""
    accepted = acceptance(drafting)
    if accepted is None:
        return None
    kind = f"{clock.value}_s"
    num_steps = [sample.parts["num_steps"] for sample in drafting]
    tokens = [sample.num_tokens / (steps * batch) for sample, steps in zip(drafting, num_steps, strict=True)]
    verify = [sample.parts[f"verify_{kind}"] / steps for sample, steps in zip(drafting, num_steps, strict=True)]
    draft = [sample.parts[f"draft_{kind}"] / steps for sample, steps in zip(drafting, num_steps, strict=True)]
    within = [sample.parts[f"step_draft_{kind}"] / steps for sample, steps in zip(drafting, num_steps, strict=True)]
    rest = [
        sample.num_tokens / (sample.rate(clock) * steps) - drafts
        for sample, steps, drafts in zip(drafting, num_steps, within, strict=True)
    ]
    step = [batch / sample.rate(clock) for sample in plain]
    speedups = [mine.rate(clock) / other.rate(clock) for mine, other in zip(drafting, plain, strict=True)]
    possible = [t * p / (v + d) for t, p, v, d in zip(tokens, step, verify, draft, strict=True)]
    median = statistics.median
    return SpeculationRow(
        model=model, dtype=dtype, batch=batch, speculate=speculate, acceptance=accepted,
        tokens_per_step=median(tokens), plain_ms=1e3 * median(step), verify_ms=1e3 * median(verify),
        draft_ms=1e3 * median(draft), step_verify_ms=1e3 * median(rest), step_draft_ms=1e3 * median(within),
        speedup=median(speedups), possible=median(possible),
        share=median(one / most for one, most in zip(speedups, possible, strict=True)),
    )


def speculation_text(rows: Sequence[SpeculationRow]) -> str:
    columns = (
        "model", "dtype", "batch", "drafts", "accepted", "plain", "verify", "draft", "verify in steps",
        "draft in steps", "speed-up", "possible", "share",
    )
    lines = [
        (each.model, each.dtype, each.batch, each.speculate, f"{each.acceptance:.2f}", f"{each.plain_ms:.2f} ms",
         f"{each.verify_ms:.2f} ms", f"{each.draft_ms:.2f} ms", f"{each.step_verify_ms:.2f} ms",
         f"{each.step_draft_ms:.2f} ms", f"{each.speedup:.2f}", f"{each.possible:.2f}", f"{each.share:.2f}")
        for each in rows
    ]
    return table(columns, lines)
