"""What is done to logits before the sampler sees them: by definition, whatever was drafted in between."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_engine.sampling.params import SamplingParams
from pd_engine.sampling.processor import LogitProcessor, process
from pd_engine.sequence import Sequence
from pd_engine.steps.sample import Place, sample_rows
from pd_kernels.backend import load_ops
from support.engine_cases import available_ops

VOCAB_SIZE = 40
BASE: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 0, "max_tokens": 50}
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)

Row = npt.NDArray[np.float32]


def by_definition(
    logits_Z: Row, params: SamplingParams, ending_ids: frozenset[int], prompt: Seq[int], generated: Seq[int]
) -> Row:
    """Token by token, one float32 operation after the other."""
    z = logits_Z.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        return _in_order(z, params, ending_ids, prompt, generated)


def _in_order(
    z: Row, params: SamplingParams, ending_ids: frozenset[int], prompt: Seq[int], generated: Seq[int]
) -> Row:
    for token, bias in params.logit_bias:
        z[token] += np.float32(bias)
    if len(generated) < params.min_tokens:
        for token in ending_ids:
            z[token] = -np.inf
    repetition = np.float32(params.repetition_penalty)
    for token in {*prompt, *generated}:
        z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
    for token in set(generated):
        z[token] -= np.float32(params.frequency_penalty) * np.float32(generated.count(token))
        z[token] -= np.float32(params.presence_penalty)
    return z


def processed(processor: LogitProcessor, logits_Z: Row, drafted: Seq[int] = ()) -> Row:
    z, table = logits_Z.copy(), processor.table(drafted)
    assert len(set(table["id"].tolist())) == len(table)
    z[table["id"]] = process(z[table["id"]], table)
    return z


@st.composite
def all_params(draw: st.DrawFn) -> SamplingParams:
    """With each of the processors, or without."""
    biased = draw(st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=4))
    return SamplingParams(
        **BASE, logit_bias=tuple(biased.items()), min_tokens=draw(st.sampled_from([0, 0, 3, 20])),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.0625, 100, width=32)),
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2, width=32)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2, width=32)),
    )


@settings(max_examples=150, deadline=None)
@given(
    params=all_params(), ending_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3), prompt=IDS,
    generated=IDS, drafts=st.lists(IDS, max_size=3), seed=st.integers(0, 1000),
)
def test_by_definition_after_any_tokens_and_drafts(
    params: SamplingParams, ending_ids: frozenset[int], prompt: list[int], generated: list[int],
    drafts: list[list[int]], seed: int,
) -> None:
    """Bit for bit; drafts that were assumed leave no trace, and one that follows in two parts is one that follows."""
    logits_Z = (np.random.default_rng(seed).standard_normal(VOCAB_SIZE) * 5).astype(np.float32)
    processor = LogitProcessor(params, ending_ids=ending_ids, prompt_ids=prompt)
    for end in (len(generated) // 2, len(generated)):
        processor.follow([*prompt, *generated[:end]])
        for drafted in drafts:
            want = by_definition(logits_Z, params, ending_ids, prompt, [*generated[:end], *drafted])
            assert np.array_equal(processed(processor, logits_Z, drafted), want)
        want = by_definition(logits_Z, params, ending_ids, prompt, generated[:end])
        assert np.array_equal(processed(processor, logits_Z), want)


def test_long_sequences_and_logits_that_are_not_finite() -> None:
    params = SamplingParams(**BASE, repetition_penalty=100.0, frequency_penalty=2.0, presence_penalty=2.0)
    generated = [token % 37 for token in range(500)]
    logits_Z = np.full(VOCAB_SIZE, np.nan, dtype=np.float32)
    logits_Z[:4] = [np.inf, -np.inf, 3e38, -3e38]
    processor = LogitProcessor(params, ending_ids=frozenset(), prompt_ids=[39])
    processor.follow([39, *generated])
    z = processed(processor, logits_Z)
    assert np.array_equal(z, by_definition(logits_Z, params, frozenset(), [39], generated), equal_nan=True)
    assert z[[0, 1, 3]].tolist() == [np.inf, -np.inf, -np.inf]


@pytest.mark.parametrize("name", available_ops())
def test_rows_of_one_step(name: str) -> None:
    """Processed rows beside others, and rows behind drafts; the logits, whose logprobs are reported, stay as they were.
    """
    ops = load_ops(name, threads=1)
    logits_TZ = torch.zeros(5, VOCAB_SIZE)
    logits_TZ[:, 7], logits_TZ[:, 8], logits_TZ[:, 9] = 3.0, 2.0, 1.0
    before = logits_TZ.clone()
    plain = Sequence(
        name="plain", token_ids=[7, 7], num_prompt_tokens=1, params=SamplingParams(**BASE), ending_ids=frozenset([7])
    )
    busy = Sequence(
        name="busy", token_ids=[9, 5], num_prompt_tokens=1, ending_ids=frozenset([7]),
        params=SamplingParams(**BASE, frequency_penalty=1.5, min_tokens=3, logit_bias=((9, 0.5),)),
    )
    places = [Place(plain), Place(busy), Place(busy, [8]), Place(busy, [8, 8]), Place(plain, [8, 8])]
    assert [place.position for place in places] == [2, 2, 3, 4, 4]
    # One token is generated, 7 may come after three: 8 (2 against 1.5), 9 (0.5 against 1.5), then 7.
    assert sample_rows(ops, logits_TZ, places) == [7, 8, 9, 7, 7]
    assert torch.equal(logits_TZ, before)
    busy.token_ids += [8, 8]
    assert sample_rows(ops, logits_TZ[:1], [Place(busy)]) == [7]
    assert plain.processor is None


def test_parameters_that_change_no_logits() -> None:
    seeded = BASE | {"temperature": 0.5, "top_p": 0.9, "min_p": 0.5, "stop": ("x",), "stop_token_ids": (5,)}
    assert not SamplingParams(**seeded).changes_logits
    for name, value in (
        ("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1), ("min_tokens", 1),
        ("logit_bias", ((5, 0.0),)),
    ):
        assert SamplingParams(**BASE, **{name: value}).changes_logits
