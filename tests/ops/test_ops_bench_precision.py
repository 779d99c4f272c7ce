"""What precision costs, on short texts: the order of things that docs/benchmarks/fp8.md states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_engine.model.checkpoint import DEMO_PATH
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_ops.bench.kernel_list import list_ops
from pd_ops.bench.precision import PrecisionPlan, PrecisionRow, measure_precision
from pd_ops.bench.precision_models import variants
from pd_ops.bench.precision_reading import first_differences, relative_error, same_choice
from support.commands import run_command

PLAN = PrecisionPlan(num_texts=2, text_tokens=48, prompt_tokens=8, answer_tokens=8)
NAMES = [
    "fp32", "FP8 weights, fp32", "fp32, FP8 latents", "bf16", "bf16, FP8 latents", "FP8 weights, fp32, FP8 latents",
    "FP8 weights, bf16", "FP8 weights, bf16, FP8 latents", "FP8 weights and activations (W8A8)",
]


@pytest.fixture(scope="module")
def rows() -> dict[str, PrecisionRow]:
    found: list[PrecisionRow] = []
    notes: list[str] = []
    measure_precision(DEMO_PATH, PLAN, note=notes.append, add=found.append)
    assert notes == [row.name for row in found] == NAMES
    return {row.name: row for row in found}


def test_errors_are_in_the_order_that_is_documented(rows: dict[str, PrecisionRow]) -> None:
    bf16, latents = rows["bf16"].error, rows["bf16, FP8 latents"].error
    w8a16 = rows["FP8 weights, bf16"].error_of_precision
    assert 0.002 < bf16 < latents < 0.02
    assert 0.5 * bf16 < w8a16 < 2 * bf16  # activations in bf16 are all that it costs over the same weights
    assert rows["FP8 weights and activations (W8A8)"].error_of_precision > 3 * w8a16
    assert 0.01 < rows["FP8 weights, fp32"].error < 0.1


def test_float32_differs_from_itself_in_nothing(rows: dict[str, PrecisionRow]) -> None:
    exact = rows["fp32"]
    assert (exact.error, exact.error_of_precision, exact.same_choice) == (0, 0, 1)
    assert exact.first_differences == (PLAN.answer_tokens,) * PLAN.num_texts
    assert exact.same_choice_in_answers == 1  # reading its own answers in one pass gives the tokens that it said
    assert rows["FP8 weights, fp32"].error_of_precision == 0


def test_shares_are_shares(rows: dict[str, PrecisionRow]) -> None:
    for row in rows.values():
        assert 0.5 < row.same_choice <= 1
        assert 0 < row.same_choice_in_answers <= 1
        assert 3 < row.nats_a_token < 5


def test_errors_are_relative_to_the_spread_of_a_row() -> None:
    logits = torch.tensor([[1.0, 3.0], [-2.0, 2.0], [10.0, 14.0]])
    assert relative_error(logits, logits) == 0.0
    expected = logits * 1.5 - 7.0
    assert relative_error(expected + torch.tensor([0.3, -0.3]), expected) == pytest.approx(0.1)


def test_first_differences() -> None:
    assert first_differences([[1, 2, 3], [1, 2, 3], [9, 2, 3]], [[1, 2, 3], [1, 5, 3], [1, 2, 3]]) == [3, 1, 0]
    assert same_choice(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == 0.5


def test_a_checkpoint_in_fp8_is_compared_with_itself(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_random_checkpoint(model, seed=0, fp8=True)
    assert [variant.exact for variant in variants(model, tmp_path)] == ["FP8 weights, fp32"] * len(
        variants(model, tmp_path)
    )


@pytest.mark.parametrize(("arguments", "said"), [
    (("--prompt-tokens", "256"), "less than --text-tokens (256)"),
    (("--answer-tokens", "4096"), "context of 4096 tokens"),
])
def test_lengths_that_do_not_fit(arguments: tuple[str, ...], said: str) -> None:
    finished = run_command("bench", "precision", *arguments)
    assert finished.code == 2
    assert said in finished.stderr


def test_the_list_of_ops_says_which_take_fp8() -> None:
    dtypes = {entry.op: entry.dtypes for entry in list_ops([])}
    for op in ("linear", "moe_experts", "latent_write", "mla_attention"):
        assert dtypes[op] == ("bf16", "fp16", "fp32", "fp8")
    assert dtypes["absorb"] == ("bf16", "fp16", "fp32")
