"""What each precision costs: where answers leave those of float32, how much of long ones would still be said, and how
far logits are off."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pd_engine.engine import Engine
from pd_ops.bench.precision_models import Variant, variants
from pd_ops.bench.precision_reading import (
    Reading,
    complete,
    first_differences,
    logits_of,
    nats_a_token,
    read,
    relative_error,
    same_choice,
)
from pd_ops.output import Document


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPlan:
    """`text_tokens`: of each text, which float32 samples; their first `prompt_tokens` are answered."""

    num_texts: int = 8
    text_tokens: int = 256
    prompt_tokens: int = 32
    answer_tokens: int = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRow:
    """One precision.

    Attributes:
        error_of_precision: of logits, against the same weights in float32; see `relative_error`.
        error: against the checkpoint's weights in float32: with FP8 weights their rounding too.
        nats_a_token: of the texts.
        same_choice: the share of the texts' positions with float32's most likely token.
        same_choice_in_answers: the same over float32's own long answers: how often it would still say what is next.
        first_differences: where each greedy answer leaves float32's; the answer's length: nowhere.
    """

    name: str
    error_of_precision: float
    error: float
    nats_a_token: float
    same_choice: float
    same_choice_in_answers: float
    first_differences: tuple[int, ...]

    @property
    def median_difference(self) -> float:
        return statistics.median(self.first_differences)

    def to_json(self) -> Document:
        return asdict(self) | {"median_difference": self.median_difference}


def measure_precision(
    model: Path, plan: PrecisionPlan, *, note: Callable[[str], None], add: Callable[[PrecisionRow], None]
) -> None:
    """Adds rows as they are known; the first one is float32's own. A checkpoint that has FP8 weights is compared with
    itself in float32."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pd-relay-precision-") as folder:
        made = variants(model, Path(folder))
        reference = made[0].load()
        texts = _texts(reference, plan)
        exact: dict[str, Reading] = {}
        for variant in made:
            note(variant.name)
            engine = reference if variant is made[0] else variant.load()
            reading = read(engine, texts, prompt_tokens=plan.prompt_tokens, answer_tokens=plan.answer_tokens)
            if variant.name == variant.exact:
                exact[variant.name] = reading
            first = exact[made[0].name]
            add(_row(variant, engine, reading, exact[variant.exact], first, texts, plan))


def _texts(engine: Engine, plan: PrecisionPlan) -> list[list[int]]:
    """Sampled from one token: id 0, BOS in DeepSeek's vocabularies."""
    return [
        [0, *complete(engine, [0], plan.text_tokens - 1, temperature=1.0, seed=seed)]
        for seed in range(plan.num_texts)
    ]


def _row(
    variant: Variant, engine: Engine, reading: Reading, same: Reading, first: Reading, texts: Sequence[Sequence[int]],
    plan: PrecisionPlan,
) -> PrecisionRow:
    return PrecisionRow(
        name=variant.name, error_of_precision=relative_error(reading.logits_NZ, same.logits_NZ),
        error=relative_error(reading.logits_NZ, first.logits_NZ), nats_a_token=nats_a_token(reading.logits_NZ, texts),
        same_choice=same_choice(reading.logits_NZ, first.logits_NZ),
        same_choice_in_answers=_kept(engine, texts, first.answers, plan),
        first_differences=tuple(first_differences(reading.answers, first.answers)),
    )


def _kept(engine: Engine, texts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], plan: PrecisionPlan
          ) -> float:
    """The share of these answers' tokens that the engine would give too, after all that stands before them."""
    kept = 0
    for text, answer in zip(texts, answers, strict=True):
        logits = logits_of(engine, [[*text[: plan.prompt_tokens], *answer]])
        chosen = logits[plan.prompt_tokens - 1 :].argmax(-1)
        kept += int((chosen == torch.tensor(answer)).sum())
    return kept / sum(len(answer) for answer in answers)
