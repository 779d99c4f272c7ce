"""The sampler: known answers of the generator, and what the processing keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd_kernels.ops import Ops, SamplingRows
from pd_kernels.sample.philox import philox, position_words
from pd_kernels.sample.reference import gumbel, kept_entries
from support import kernel_ops
from support.kernel_cases import sampling_rows

ALL_ONES = 0xFFFFFFFF

# kat_vectors of Random123 (Salmon et al.), philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.fixture(params=kernel_ops.names())
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernel_ops.load(request.param)


def rows(count: int = 1, *, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0,
         seed: int = 1, first_position: int = 0) -> SamplingRows:
    return SamplingRows(
        temperature_T=np.full(count, temperature, np.float32), top_k_T=np.full(count, top_k, np.int32),
        top_p_T=np.full(count, top_p, np.float32), min_p_T=np.full(count, min_p, np.float32),
        seed_T=np.full(count, seed, np.uint64),
        position_T=np.arange(first_position, first_position + count, dtype=np.int64))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    words = philox(np.array(counter, dtype=np.uint32)[:, None], key)
    assert tuple(words[:, 0].tolist()) == result


def test_words_are_keyed_by_seed_position_and_entry() -> None:
    seed, position = 0x299F31D0A4093822, 0x13198A2E85A308D3
    words = position_words(seed, position, 10)
    expected = philox(
        np.array([[0, 1, 2], [0x85A308D3] * 3, [0x13198A2E] * 3, [0] * 3], dtype=np.uint32), (0xA4093822, 0x299F31D0))
    assert words.tolist() == expected.T.reshape(-1)[:10].tolist()
    assert position_words(seed, position, 7).tolist() == words[:7].tolist()


def test_noise_is_finite_and_standard_gumbel() -> None:
    extremes = gumbel(np.array([0, ALL_ONES], dtype=np.uint32))
    assert np.isfinite(extremes).all()
    noise = gumbel(position_words(3, 5, 400_000)).astype(np.float64)
    assert abs(noise.mean() - 0.5772157) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02


def test_greedy_takes_the_lowest_of_equal_entries(ops: Ops) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 7] = logits[0, 31] = 2.0
    assert ops.sample(logits, rows(2, temperature=0.0)).tolist() == [7, 0]


def test_frequencies_follow_the_softmax(ops: Ops) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).repeat(5_000, 1)
    tokens = ops.sample(logits, rows(5_000, temperature=0.7))
    expected = torch.softmax(logits[0].double() / 0.7, 0).numpy()
    assert np.abs(np.bincount(tokens, minlength=5) / 5_000 - expected).max() < 0.025


def test_top_k_and_top_p_keep_what_they_should(ops: Ops) -> None:
    p = np.array([0.5, 0.25, 0.15, 0.1])
    logits = torch.from_numpy(np.log(p).astype(np.float32)).repeat(400, 1)
    seen = {
        (top_k, top_p): set(ops.sample(logits, rows(400, top_k=top_k, top_p=top_p)).tolist())
        for top_k, top_p in [(-1, 1.0), (1, 1.0), (2, 1.0), (-1, 0.4), (-1, 0.6), (-1, 0.95), (3, 0.6), (9, 1.0),
                             (2, 0.7), (-1, 1e-9)]
    }
    assert seen == {
        (-1, 1.0): {0, 1, 2, 3}, (1, 1.0): {0}, (2, 1.0): {0, 1}, (-1, 0.4): {0}, (-1, 0.6): {0, 1},
        (-1, 0.95): {0, 1, 2, 3}, (3, 0.6): {0, 1}, (9, 1.0): {0, 1, 2, 3}, (2, 0.7): {0, 1}, (-1, 1e-9): {0},
    }


def test_min_p_keeps_what_it_should(ops: Ops) -> None:
    """Entries at least min_p times as likely as the best; then top-k of those, then top-p of what is left of it all."""
    p = np.array([0.1, 0.5, 0.15, 0.25])
    logits = torch.from_numpy(np.log(p).astype(np.float32)).repeat(400, 1)
    seen = {
        (min_p, top_k, top_p): set(ops.sample(logits, rows(400, min_p=min_p, top_k=top_k, top_p=top_p)).tolist())
        for min_p, top_k, top_p in [
            (1e-9, -1, 1.0), (0.19, -1, 1.0), (0.21, -1, 1.0), (0.49, -1, 1.0), (0.51, -1, 1.0), (1.0, -1, 1.0),
            (0.21, 2, 1.0), (0.49, 3, 1.0), (0.49, 2, 1.0), (0.49, -1, 0.66), (0.49, -1, 0.67), (0.0, -1, 0.66),
        ]
    }
    assert seen == {
        (1e-9, -1, 1.0): {0, 1, 2, 3}, (0.19, -1, 1.0): {0, 1, 2, 3}, (0.21, -1, 1.0): {1, 2, 3},
        (0.49, -1, 1.0): {1, 3}, (0.51, -1, 1.0): {1}, (1.0, -1, 1.0): {1}, (0.21, 2, 1.0): {1, 3},
        (0.49, 3, 1.0): {1, 3}, (0.49, 2, 1.0): {1, 3}, (0.49, -1, 0.66): {1}, (0.49, -1, 0.67): {1, 3},
        (0.0, -1, 0.66): {1, 3},
    }


def test_min_p_of_one_keeps_the_best_entry_and_its_ties(ops: Ops) -> None:
    logits = torch.tensor([1.0, 3.0, 2.9999998, 3.0, float("-inf")]).repeat(300, 1)
    assert set(ops.sample(logits, rows(300, min_p=1.0)).tolist()) == {1, 3}
    assert set(ops.sample(logits, rows(300, min_p=1.0, top_k=1)).tolist()) == {1}
    assert set(ops.sample(logits, rows(300, min_p=0.5, top_k=2)).tolist()) == {1, 3}


def test_min_p_is_applied_after_the_temperature(ops: Ops) -> None:
    logits = torch.tensor([0.0, -1.0, -4.0]).repeat(300, 1)
    assert set(ops.sample(logits, rows(300, min_p=0.3)).tolist()) == {0, 1}
    assert set(ops.sample(logits, rows(300, min_p=0.3, temperature=4.0)).tolist()) == {0, 1, 2}
    assert set(ops.sample(logits, rows(300, min_p=0.3, temperature=0.5)).tolist()) == {0}


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_index(ops: Ops) -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 1.0, 3.0]).repeat(500, 1)
    assert set(ops.sample(logits, rows(500, top_k=3)).tolist()) == {0, 1, 4}
    assert sorted(kept_entries(logits[0].numpy(), 3, 1.0).tolist()) == [0, 1, 4]


def test_non_finite_logits(ops: Ops) -> None:
    """NaN and -inf never win; the rest is sampled as if they were not there."""
    logits = torch.full((200, 33), float("-inf"))
    logits[:, 5] = float("nan")
    logits[:, 20] = 1.0
    logits[:, 21] = 1.0
    for options in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9}, {"top_k": 10, "top_p": 0.99},
                    {"min_p": 0.5}, {"min_p": 1.0, "top_p": 0.9}):
        tokens = set(ops.sample(logits, rows(200, **options)).tolist())  # type: ignore[arg-type]
        assert tokens == ({20} if options == {"temperature": 0.0} else {20, 21})


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_row_without_any_finite_logit_gives_the_first_entry(ops: Ops, value: float) -> None:
    logits = torch.full((1, 70), value)
    for options in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9}, {"top_k": 10, "top_p": 0.99},
                    {"min_p": 0.5}, {"min_p": 1.0, "top_p": 0.9}):
        assert ops.sample(logits, rows(1, **options)).tolist() == [0]  # type: ignore[arg-type]


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("size", [1, 7, 64, 1001])
def test_every_implementation_chooses_the_same_token(spread: float, size: int) -> None:
    """Flat and peaked rows, with ties, all options: token for token the reference's."""
    rng = np.random.default_rng(size)
    logits = torch.from_numpy((np.round(rng.normal(size=(60, size)) * 8) / 8 * spread).astype(np.float32))
    options = sampling_rows(60, size)
    expected = kernel_ops.load("reference").sample(logits, options).tolist()
    for name in kernel_ops.compiled_names():
        assert kernel_ops.load(name).sample(logits, options).tolist() == expected, name


def test_tiny_temperature_is_greedy_and_huge_logits_stay_finite(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 1e30, -1e30, 1e30]])
    assert ops.sample(logits, rows(temperature=1e-7)).tolist() == [1]
    assert ops.sample(logits, rows(temperature=1e-5)).tolist() in ([1], [3])


def test_same_position_same_token_other_position_other_noise(ops: Ops) -> None:
    logits = torch.zeros(64, 1000)
    first, second = ops.sample(logits, rows(64)), ops.sample(logits, rows(64, first_position=1))
    assert first[1:].tolist() == second[:-1].tolist()
    assert len(set(first.tolist())) > 50
