"""The monolithic oracle: text, ends, errors, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest

from pd_engine.cache.checksums import slot_checksums
from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument, ResourceExhausted
from pd_engine.generate import Delta, Generation, generate, generate_stream
from pd_engine.model.checkpoint import DEMO_PATH
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import FinishReason
from pd_engine.steps.prefill import Chunk, prefill_step
from pd_engine.text.tokenizer import Tokenizer
from support.engine_cases import load_engine

PROMPT = "The asyncio module provides"


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine(DEMO_PATH, dtype="auto", cache_mib=8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_PATH)


@pytest.fixture(autouse=True)
def nothing_is_left(demo: Engine) -> Any:
    yield
    demo.pool.check_integrity()
    assert demo.pool.num_free == demo.pool.num_blocks


def params(**overrides: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 1, "max_tokens": 24}
    return SamplingParams(**(chosen | overrides))


def test_it_writes_the_documented_sentence(demo: Engine, tokenizer: Tokenizer) -> None:
    answer = generate(demo, tokenizer, tokenizer.encode(PROMPT, add_bos=True), params(), speculate=1)
    assert answer.text.startswith(" a new API for the standard library")
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.stop_reason == ""
    assert answer.seed == 1
    assert answer.logprobs == ()
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(tokenizer.encode(PROMPT, add_bos=True)), 24
    )
    assert 0 < answer.accepted_tokens <= answer.drafted_tokens
    assert answer.text == tokenizer.decode(answer.token_ids)


def test_a_stream_is_the_answer_in_parts(demo: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT, add_bos=True)
    sampled = params(temperature=0.8, seed=5, logprobs=2, max_tokens=12)
    *deltas, answer = generate_stream(demo, tokenizer, ids, sampled, speculate=2)
    assert isinstance(answer, Generation)
    assert answer == generate(demo, tokenizer, ids, sampled, speculate=2)
    position = 0
    for delta in deltas:
        assert isinstance(delta, Delta)
        assert delta.index == position
        position += len(delta.tokens)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == answer.text
    assert tuple(t.token_id for d in deltas if isinstance(d, Delta) for t in d.tokens) == answer.token_ids
    assert [t.logprobs for d in deltas if isinstance(d, Delta) for t in d.tokens] == list(answer.logprobs)


@pytest.mark.parametrize("speculate", [0, 3])
def test_a_stop_string_at_every_place(demo: Engine, tokenizer: Tokenizer, speculate: int) -> None:
    """The token that completes it is the last one, the text is cut before it, whatever was accepted beyond."""
    ids = tokenizer.encode(PROMPT, add_bos=True)
    whole = generate(demo, tokenizer, ids, params(max_tokens=10))
    for start in range(0, len(whole.text) - 3, 5):
        stop = whole.text[start : start + 3]
        answer = generate(demo, tokenizer, ids, params(max_tokens=10, stop=(stop,)), speculate=speculate)
        end = whole.text.index(stop)
        assert answer.text == whole.text[:end]
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert stop in tokenizer.decode(answer.token_ids)
        assert stop not in tokenizer.decode(answer.token_ids[:-1])


def test_stop_tokens_and_eos(demo: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT, add_bos=True)
    whole = generate(demo, tokenizer, ids, params())
    stop = whole.token_ids[4]
    assert stop not in whole.token_ids[:4]
    answer = generate(demo, tokenizer, ids, params(stop_token_ids=(stop,)), speculate=2)
    assert answer.token_ids == whole.token_ids[:5]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, str(stop))
    ends_there = Tokenizer.load(DEMO_PATH)
    ends_there.eos_token_ids = (stop,)
    assert generate(demo, ends_there, ids, params()).token_ids == whole.token_ids[:5]
    assert generate(demo, ends_there, ids, params(ignore_eos=True)) == whole


@pytest.mark.parametrize(
    ("prompt_ids", "overrides", "match"),
    [
        ([], {}, "at least one token"),
        ([5] * 4096, {}, "4095 at most"),
        ([5] * 4097, {}, "4095 at most"),
        ([5, 4096], {}, r"in \[0, 4096\), got 4096"),
        ([5, -1], {}, r"got -1"),
        ([5] * 4000, {"max_tokens": 97}, "max_tokens must be at most 96"),
    ],
)
def test_prompts_that_do_not_fit_the_model(
    demo: Engine, tokenizer: Tokenizer, prompt_ids: list[int], overrides: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidArgument, match=match):
        generate(demo, tokenizer, prompt_ids, params(**overrides))


def test_a_request_that_does_not_fit_the_cache(demo: Engine, tokenizer: Tokenizer) -> None:
    assert demo.pool.num_blocks * demo.layout.block_size < 4000
    with pytest.raises(ResourceExhausted, match="blocks wanted"):
        generate(demo, tokenizer, [5] * 10, params(max_tokens=4000))


def test_closing_a_stream_gives_the_blocks_back(demo: Engine, tokenizer: Tokenizer) -> None:
    stream = generate_stream(demo, tokenizer, [0, 5, 6], params())
    next(stream)
    assert demo.pool.num_free < demo.pool.num_blocks
    stream.close()  # type: ignore[attr-defined]
    assert demo.pool.num_free == demo.pool.num_blocks


def test_checksums_are_of_the_valid_slots_component_by_component(demo: Engine, tokenizer: Tokenizer) -> None:
    ids = [0, *range(100, 136)]  # two full blocks and five slots
    answer = generate(demo, tokenizer, ids, params(max_tokens=2), checksums=True, chunk_tokens=10)
    assert len(answer.prompt_checksums) == 5 * 3
    assert len(set(answer.prompt_checksums)) == 15
    assert answer.prompt_checksums == generate(
        demo, tokenizer, ids, params(max_tokens=9), checksums=True, chunk_tokens=37, speculate=2
    ).prompt_checksums
    other = generate(demo, tokenizer, [*ids[:-1], 7], params(max_tokens=2), checksums=True).prompt_checksums
    same = [number for number in range(15) if other[number] == answer.prompt_checksums[number]]
    assert same == [number for number in range(15) if number % 3 != 2]  # only the tail pieces differ


def test_checksums_ignore_slots_beyond_the_valid_ones(demo: Engine) -> None:
    from support.engine_cases import new_sequence, release

    sequence = new_sequence(demo, [0, *range(100, 120)])
    prefill_step(demo, [Chunk(sequence=sequence, num_tokens=21)])
    before = slot_checksums(demo.ops, demo.arena, sequence.block_ids, 21)
    demo.arena.components[0][sequence.block_ids[1], 5:] = 7
    assert slot_checksums(demo.ops, demo.arena, sequence.block_ids, 21) == before
    demo.arena.components[0][sequence.block_ids[1], 4, 0] += 1
    after = slot_checksums(demo.ops, demo.arena, sequence.block_ids, 21)
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False] + [True] * 8
    release(demo, sequence)
