"""Numbers that are not finite at run time: only the choice concerned ends, and no token is taken from them.

A token whose embedding is made NaN after loading stands for arithmetic that overflows: all that its row computes,
latents included, is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.runner import DecodeRunner
from decode_worker.runner import StepReport as DecodeReport
from decode_worker.scheduler import Place
from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.generate import Delta, generate_stream
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import Sequence
from pd_engine.steps.decode import DecodeOutput, decode_step, try_decode_step
from pd_engine.steps.overflow import finite_rows
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first, try_sample_first
from pd_engine.text.tokenizer import Tokenizer
from prefill_worker.runner import PrefillRunner
from prefill_worker.runner import StepReport as PrefillReport
from support.engine_cases import load_engine, new_sequence, random_ids, release, release_all

MESSAGE = "the model's arithmetic overflowed: the logits of the token at position {} hold NaN or infinity"
PROMPT = random_ids(320, 9)
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path], ops: str) -> Engine:
    return load_engine(checkpoints["base"], ops=ops)


@pytest.fixture
def poison(engine: Engine) -> Iterator[Any]:
    """poison(token): its embedding is NaN until the test ends."""
    embedding_ZD = engine.main.weights.embedding_ZD
    kept = embedding_ZD.clone()

    def fill(token: int) -> None:
        embedding_ZD[token] = torch.nan

    yield fill
    embedding_ZD.copy_(kept)
    release_all(engine)


def prefilled(engine: Engine, prompt: list[int], name: str, **options: Any) -> Sequence:
    sequence = new_sequence(engine, prompt, name=name, max_tokens=NUM_TOKENS, logprobs=2, **options)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=len(prompt))])
    return sequence


def answer(engine: Engine, prompt: list[int], name: str, **options: Any) -> list[int]:
    sequence = prefilled(engine, prompt, name, **options)
    sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        decode_step(engine, [sequence])
    release(engine, sequence)
    return sequence.generated_ids


def last_new_token(tokens: list[int], prompt: list[int]) -> int:
    """Index of a generated token that occurs nowhere before: the sequence is as it was up to there."""
    return max(index for index, token in enumerate(tokens[:-1]) if token not in [*prompt, *tokens[:index]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_one_number_that_is_not_finite(value: float) -> None:
    logits = torch.randn(4, 301)
    logits[1, 300] = value
    logits[2] = 3e38  # finite, though the sum is not
    assert finite_rows(logits) == [True, False, True, True]


def test_a_prompt_that_overflows_ends_alone(engine: Engine, poison: Any) -> None:
    want = answer(engine, PROMPT, "want")
    bad_token = next(token for token in range(5, 320) if token not in PROMPT + want)
    poison(bad_token)
    good, bad = (prefilled(engine, prompt, name) for prompt, name in ((PROMPT, "good"), ([*PROMPT, bad_token], "bad")))
    first, error = try_sample_first(engine, [good, bad])
    assert not isinstance(first, Internal)
    assert good.generated_ids == [first.token_id] == want[:1]
    assert isinstance(error, Internal)
    assert error.message == MESSAGE.format(10)
    assert bad.generated_ids == []
    with pytest.raises(Internal, match="position 10"):
        sample_first(engine, [bad])


@pytest.mark.parametrize("speculate", [0, 3])
def test_a_stream_that_overflows_ends_alone(engine: Engine, poison: Any, speculate: int) -> None:
    """It has all tokens up to there, with drafts as without; the one beside it does not notice."""
    other_prompt = random_ids(320, 12, seed=4)
    want, other_want = answer(engine, PROMPT, "want"), answer(engine, other_prompt, "other want")
    last = last_new_token(want, PROMPT)
    assert want[last] not in other_prompt + other_want
    assert last > 2
    poison(want[last])
    bad = prefilled(engine, PROMPT, "bad", speculate=speculate)
    good = prefilled(engine, other_prompt, "good", speculate=speculate)
    sample_first(engine, [bad, good])
    while good.finish_reason() is None:
        outcome = try_decode_step(engine, [bad, good])[0]
        if isinstance(outcome, Internal):
            break
    assert isinstance(outcome, Internal)
    assert outcome.message == MESSAGE.format(len(PROMPT) + last + 1)
    assert bad.generated_ids == want[: last + 1]
    while good.finish_reason() is None:
        assert isinstance(try_decode_step(engine, [good])[0], DecodeOutput)
    assert good.generated_ids == other_want


def test_blocks_that_held_nan_are_as_good_as_new(engine: Engine, poison: Any) -> None:
    prompt = random_ids(320, 40)
    want = answer(engine, prompt, "want", speculate=2)
    bad_token = next(token for token in range(5, 320) if token not in prompt + want)
    poison(bad_token)
    bad = prefilled(engine, [bad_token] * 40, "bad", num_blocks=engine.pool.num_blocks)
    assert isinstance(try_sample_first(engine, [bad])[0], Internal)
    release(engine, bad)
    assert answer(engine, prompt, "again", speculate=2) == want


def test_one_process_gives_what_came_and_then_the_error(engine: Engine, poison: Any, checkpoints: Any) -> None:
    want = answer(engine, PROMPT, "want")
    last = last_new_token(want, PROMPT)
    poison(want[last])
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    steps = generate_stream(engine, Tokenizer.load(checkpoints["base"]), PROMPT, params, speculate=2)
    given: list[int] = []

    def take_all() -> None:
        for step in steps:
            assert isinstance(step, Delta)
            given.extend(token.token_id for token in step.tokens)

    with pytest.raises(Internal, match=f"position {len(PROMPT) + last + 1} "):
        take_all()
    assert given == want[: last + 1]
    assert engine.pool.num_free == engine.pool.num_blocks


def test_workers_tell_whose_numbers_overflowed(engine: Engine, poison: Any) -> None:
    want = answer(engine, PROMPT, "want")
    bad_token = next(token for token in range(5, 320) if token not in PROMPT + want)
    poison(bad_token)
    prefills: list[PrefillReport] = []
    prefill = PrefillRunner(engine, 64, prefills.append)
    good, bad = (
        new_sequence(engine, prompt, name=name, max_tokens=NUM_TOKENS)
        for prompt, name in ((PROMPT, "good"), ([*PROMPT, bad_token], "bad"))
    )
    prefill.add(good, None)
    prefill.add(bad, None)
    assert prefill.step()
    assert not prefill.step(), "both are forgotten"
    [report] = prefills
    assert [(first.name, first.token.token_id) for first in report.first_tokens] == [("good", want[0])]
    assert {name: error.message for name, error in report.failed.items()} == {"bad": MESSAGE.format(10)}

    decodes: list[DecodeReport] = []
    decode = DecodeRunner(engine, 4, decodes.append)
    bad.token_ids.append(bad_token)
    decode.add(good, Place(arrival=0))
    decode.add(bad, Place(arrival=1))
    while decode.step():
        pass
    assert {name: error.message for name, error in decodes[0].failed.items()} == {"bad": MESSAGE.format(11)}
    assert decodes[0].num_running == 1
    assert good.generated_ids == want
