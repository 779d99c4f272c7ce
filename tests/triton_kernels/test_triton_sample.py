"""Sampling: the random words, the noise and the polynomials bit for bit, and the same tokens as the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd_kernels.elementary import reference as elementary_reference
from pd_kernels.ops import SamplingRows
from pd_kernels.sample import philox
from pd_kernels.sample import reference as sample_reference
from support.triton_cases import reference_ops, triton_ops

import triton  # isort: skip
import triton.language as tl  # isort: skip
from pd_kernels.elementary import triton as elementary  # isort: skip
from pd_kernels.sample import triton as sample  # isort: skip

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1)


@triton.jit
def elementwise_kernel(x_ptr, y_ptr, LOG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    if LOG:
        tl.store(y_ptr + i, elementary.log(x))
    else:
        tl.store(y_ptr + i, elementary.exp(x))


@triton.jit
def noise_kernel(seed_ptr, position_ptr, words_ptr, noise_ptr, BLOCK: tl.constexpr):
    entry = tl.arange(0, BLOCK)
    words = sample.position_words(tl.load(seed_ptr), tl.load(position_ptr), entry)
    tl.store(words_ptr + entry, words.to(tl.int64))
    tl.store(noise_ptr + entry, sample.gumbel(words))


def same_float_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan = a.isnan() & b.isnan()
    return torch.equal(a.view(torch.int32)[~nan], b.view(torch.int32)[~nan])


def test_exp_is_bit_for_bit_the_reference() -> None:
    x = torch.cat([torch.linspace(-90, 90, 2**14 - 4), torch.tensor([float("nan"), 1e30, -1e30, -0.0])])
    y = torch.empty_like(x)
    elementwise_kernel[(1,)](x, y, LOG=False, BLOCK=len(x))
    assert same_float_bits(y, elementary_reference.exp(x.clone()))


def test_log_is_bit_for_bit_the_reference() -> None:
    x = np.concatenate([np.geomspace(1e-37, 1e37, 2**13), 1 + np.linspace(-0.4, 0.4, 2**13)]).astype(np.float32)
    y = torch.empty(len(x))
    elementwise_kernel[(1,)](torch.from_numpy(x), y, LOG=True, BLOCK=len(x))
    assert same_float_bits(y, torch.from_numpy(elementary_reference.log(x)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [0, 5, 2**32 + 3])
def test_words_and_noise_are_those_of_the_cpu(seed: int, position: int) -> None:
    words, noise = torch.empty(256, dtype=torch.int64), torch.empty(256)
    keys = torch.from_numpy(np.array([seed], dtype=np.uint64).view(np.int64))
    noise_kernel[(1,)](keys, torch.tensor([position]), words, noise, BLOCK=256)
    expected = philox.position_words(seed, position, 256)
    assert np.array_equal(words.numpy().astype(np.uint32), expected)
    assert same_float_bits(noise, torch.from_numpy(sample_reference.gumbel(expected)))


def hostile_logits(kind: str, num_rows: int, size: int, rng: np.random.Generator) -> np.ndarray:
    logits = (rng.standard_normal((num_rows, size)) * rng.choice([0.1, 3.0])).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "zeros":
        return logits * np.float32(0) * np.where(rng.random((num_rows, size)) < 0.5, -1, 1).astype(np.float32)
    if kind == "nan":
        logits[:, rng.integers(0, size)] = np.nan
    if kind == "minus infinity":
        logits[rng.random((num_rows, size)) < 0.7] = -np.inf
        logits[0] = -np.inf
    if kind == "steep":
        logits *= 1000
    return logits


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "nan", "minus infinity", "steep"])
@pytest.mark.parametrize(
    "size", [1, 130, pytest.param(300, marks=pytest.mark.slow), pytest.param(sample.BLOCK + 1, marks=pytest.mark.slow)]
)
def test_tokens_are_those_of_the_reference(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    num_rows = 9
    rows = SamplingRows(
        temperature_T=np.array([0.0, 0.3, 1.0, 2.5, 1.0, 0.7, 1.0, 0.7, 2.0], np.float32),
        top_k_T=np.array([3, -1, 1, 20, 10_000, 4, -1, 5, -1], np.int32),
        top_p_T=np.array([0.5, 1.0, 1.0, 0.9, 1e-6, 0.6, 1.0, 1.0, 0.8], np.float32),
        min_p_T=np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.2, 0.01], np.float32),
        seed_T=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        position_T=rng.integers(0, 2**40, num_rows, dtype=np.int64),
    )
    logits = torch.from_numpy(hostile_logits(kind, num_rows, size, rng))
    assert np.array_equal(triton_ops().sample(logits, rows), reference_ops().sample(logits, rows))


def test_top_p_ends_within_ties_as_the_reference_does() -> None:
    """All entries alike: exactly as many stay as top_p says, the first ones."""
    size = 16
    rows = SamplingRows(
        temperature_T=np.ones(24, np.float32), top_k_T=np.repeat(np.array([-1, 6], np.int32), [16, 8]),
        top_p_T=np.full(24, 0.3, np.float32), min_p_T=np.zeros(24, np.float32),
        seed_T=np.arange(24, dtype=np.uint64), position_T=np.zeros(24, np.int64))
    tokens = triton_ops().sample(torch.zeros(24, size), rows)
    assert np.array_equal(tokens, reference_ops().sample(torch.zeros(24, size), rows))
    assert set(tokens[:16]) == {0, 1, 2, 3, 4}
    assert set(tokens[16:]) == {0, 1}


def test_min_p_keeps_all_ties_of_the_last_entry() -> None:
    """Two values, one half as likely as the other: min-p counts values, top-k and top-p then count entries."""
    logits = torch.tensor([0.0, -0.6931472, -9.0, -0.6931472, 0.0, -0.6931472, 0.0, -9.0]).repeat(12, 1)
    rows = SamplingRows(
        temperature_T=np.ones(12, np.float32), top_k_T=np.repeat(np.array([-1, 4, -1, -1], np.int32), 3),
        top_p_T=np.repeat(np.array([1.0, 1.0, 1.0, 0.7], np.float32), 3),
        min_p_T=np.repeat(np.array([0.4, 0.4, 0.6, 0.4], np.float32), 3),
        seed_T=np.arange(12, dtype=np.uint64), position_T=np.zeros(12, np.int64))
    tokens = triton_ops().sample(logits, rows)
    assert np.array_equal(tokens, reference_ops().sample(logits, rows))
    kept = [{0, 1, 3, 4, 5, 6}, {0, 1, 4, 6}, {0, 4, 6}, {0, 1, 4, 6}]
    assert all(token in kept[row // 3] for row, token in enumerate(tokens.tolist()))
