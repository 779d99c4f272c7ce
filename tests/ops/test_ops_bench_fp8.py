"""What FP8 costs in accuracy, on short texts: the order of things that docs/benchmarks/fp8.md states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_engine.model.checkpoint import resolve_model
from pd_ops.bench import fp8_error
from pd_ops.bench.fp8_error import complete, load, load_quantizing, read, relative_error, write_fp8_copy
from pd_ops.bench.kernel_list import list_ops

NUM_TOKENS = 48


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_error, "GREEDY_TOKENS", 2)


@pytest.mark.usefixtures("short")
def test_errors_are_in_the_order_that_is_documented(tmp_path: Path) -> None:
    demo, quantized = resolve_model("demo"), tmp_path / "model"
    write_fp8_copy(demo, quantized)
    exact = load(demo, "fp32")
    texts = [[0, *complete(exact, [0], NUM_TOKENS - 1, temperature=1.0, seed=seed)] for seed in range(2)]
    reference = read(exact, texts).logits_NZ
    assert reference.shape == (2 * (NUM_TOKENS - 1), 4096)
    weights = read(load(quantized, "fp32"), texts).logits_NZ

    bf16 = relative_error(read(load(demo, "bf16"), texts).logits_NZ, reference)
    latents = relative_error(read(load(demo, "bf16", "fp8"), texts).logits_NZ, reference)
    w8a16 = relative_error(read(load(quantized, "bf16"), texts).logits_NZ, weights)
    w8a8 = relative_error(read(load_quantizing(quantized), texts).logits_NZ, weights)
    assert 0.002 < bf16 < latents < 0.02
    assert 0.5 * bf16 < w8a16 < 2 * bf16  # activations in bf16 are all that it costs over the same weights
    assert w8a8 > 3 * w8a16
    assert 0.01 < relative_error(weights, reference) < 0.1


def test_errors_are_relative_to_the_spread_of_a_row() -> None:
    logits = torch.tensor([[1.0, 3.0], [-2.0, 2.0], [10.0, 14.0]])
    assert relative_error(logits, logits) == 0.0
    expected = logits * 1.5 - 7.0
    assert relative_error(expected + torch.tensor([0.3, -0.3]), expected) == pytest.approx(0.1)


def test_the_list_of_ops_says_which_take_fp8() -> None:
    dtypes = {entry.op: entry.dtypes for entry in list_ops([])}
    for op in ("linear", "moe_experts", "latent_write", "mla_attention"):
        assert dtypes[op] == ("bf16", "fp32", "fp8")
    assert dtypes["absorb"] == ("bf16", "fp32")
