"""All of sampling is exact: with drafts or without, alone or in a batch, interrupted anywhere and resumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sequence import FinishReason, SampledToken, Sequence
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from support.engine_cases import load_engine, new_sequence, random_ids, release
from support.engine_play import Request, alone, together

NUM_TOKENS = 18
PROMPT = tuple(random_ids(320, 23))
ENDING_IDS = frozenset(range(5, 320, 5))
PROCESSORS: dict[str, Any] = {
    "logit_bias": ((11, 0.75), (12, -100.0), (13, 0.5), (250, 1.0)), "min_tokens": 12, "repetition_penalty": 1.1,
    "presence_penalty": -1.5, "frequency_penalty": 0.75, "logprobs": 2, "max_tokens": NUM_TOKENS,
}
GREEDY = PROCESSORS | {"temperature": 0.0}
SEEDED = PROCESSORS | {"temperature": 1.2, "min_p": 0.1, "top_k": 100, "top_p": 0.98, "seed": 2**63 + 11}
MODES = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model whose drafts are mostly accepted."""
    path = tmp_path_factory.mktemp("sampling") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=3, layer_scale=0.12)
    return load_engine(path, cache_mib=32)


def request(params: dict[str, Any], **changes: Any) -> Request:
    return Request(prompt=PROMPT, params=params | changes, ending_ids=ENDING_IDS)


@MODES
def test_every_processor_changes_answers(engine: Engine, params: dict[str, Any]) -> None:
    """Else the tests below would show nothing of it."""
    neutral: dict[str, Any] = {
        "logit_bias": (), "min_tokens": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }
    if params is SEEDED:
        neutral["min_p"] = 0.0
    prompts = [tuple(random_ids(320, 23, seed=seed)) for seed in range(16)]

    def answers(**changes: Any) -> list[Any]:
        asked = [replace(request(params, **changes), prompt=prompt) for prompt in prompts]
        return [answer.tokens for answer in together(engine, asked, speculate=[0] * 16)]

    whole = answers()
    for name, value in neutral.items():
        assert answers(**{name: value}) != whole, name


@MODES
def test_any_number_of_drafts_gives_the_plain_answer(engine: Engine, params: dict[str, Any]) -> None:
    whole = alone(engine, request(params))
    assert len(whole.tokens) > 12
    assert not {token.token_id for token in whole.tokens[:12]} & ENDING_IDS
    answers = together(engine, [request(params)] * 8, speculate=range(1, 9))
    assert answers == [whole] * 8


@MODES
def test_drafts_are_accepted_where_penalties_count_them(engine: Engine, params: dict[str, Any]) -> None:
    """Drafts that ignored the drafts before them, or the penalties, would rarely be those that the target samples."""
    for speculate in (1, 4):
        sequence = new_sequence(
            engine, PROMPT, speculate=speculate, ending_ids=ENDING_IDS, **params
        )
        prefill_step(engine, [Chunk(sequence=sequence, num_tokens=len(PROMPT))])
        sample_first(engine, [sequence])
        longest = 0
        while sequence.finish_reason() is None:
            [output] = decode_step(engine, [sequence])
            longest = max(longest, len(output.tokens))
        release(engine, sequence)
        assert longest == speculate + 1


@MODES
def test_resumed_anywhere_it_goes_on_as_if_nothing_had_happened(engine: Engine, params: dict[str, Any]) -> None:
    """After any token, with any number of drafts: counts are rebuilt from the prompt and the emitted tokens."""
    whole = alone(engine, request(params)).tokens
    ids = [token.token_id for token in whole]
    resumed = [
        new_sequence(
            engine, [*PROMPT, *ids[:emitted]], name=f"after {emitted}, {speculate} drafts",
            num_prompt_tokens=len(PROMPT), speculate=speculate, ending_ids=ENDING_IDS, **params,
        )
        for emitted in range(1, len(whole))
        for speculate in range(9)
    ]
    for sequence, tokens in zip(resumed, _finish(engine, resumed), strict=True):
        assert tuple(tokens) == whole[len(whole) - len(tokens) :], sequence.name
        assert sequence.generated_ids == ids, sequence.name
    release(engine, *resumed)


def test_same_seed_alone_and_in_a_full_batch(engine: Engine) -> None:
    """Sixteen requests of every kind together, each with other drafts than its neighbours."""
    kinds: list[dict[str, Any]] = [
        SEEDED | {"min_tokens": 7}, {"temperature": 0.9, "seed": 5, "logprobs": 1}, GREEDY,
        {"temperature": 1.0, "min_p": 0.1, "seed": 5},
        {"temperature": 1.0, "presence_penalty": 2.0, "seed": 7}, {"temperature": 0.0, "repetition_penalty": 1.8},
        {"temperature": 1.1, "logit_bias": ((40, 3.0), (41, -3.0)), "seed": 8, "logprobs": 0},
        {"temperature": 0.8, "frequency_penalty": -1.0, "seed": 9, "max_tokens": 10},
    ]
    requests = [
        Request(
            prompt=tuple(random_ids(320, 3 + 4 * number, seed=number)), params={"min_tokens": 4} | kinds[number % 8],
            ending_ids=ENDING_IDS if number % 3 else frozenset(),
        )
        for number in range(16)
    ]
    want = [alone(engine, r) for r in requests]
    assert together(engine, requests, speculate=[number % 5 for number in range(16)]) == want
    assert together(engine, requests, speculate=[0] * 16) == want


@MODES
@pytest.mark.parametrize("speculate", [0, 1, 4])
def test_every_min_tokens_and_max_tokens(engine: Engine, params: dict[str, Any], speculate: int) -> None:
    """The ending token never comes before min_tokens others, and may come after."""
    requests = [
        request(params, min_tokens=least, max_tokens=most) for most in (1, 2, 7, 16) for least in range(0, most + 1, 3)
    ]
    answers = together(engine, requests, speculate=[speculate] * len(requests))
    for asked, answer in zip(requests, answers, strict=True):
        ends = [token.token_id in ENDING_IDS for token in answer.tokens]
        assert not any(ends[: asked.params["min_tokens"]])
        assert not any(ends[:-1])
        assert answer.finish_reason is (FinishReason.STOP if ends[-1] else FinishReason.LENGTH)
    if speculate:
        assert answers == together(engine, requests, speculate=[0] * len(requests))


def _finish(engine: Engine, sequences: list[Sequence]) -> list[list[SampledToken]]:
    """Prefills all that they have, and decodes them to their ends, in one batch."""
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=sequence.num_tokens) for sequence in sequences])
    tokens = [[token] for token in sample_first(engine, sequences)]
    while running := [n for n, sequence in enumerate(sequences) if sequence.finish_reason() is None]:
        for number, output in zip(running, decode_step(engine, [sequences[n] for n in running]), strict=True):
            tokens[number] += output.tokens
    return tokens
