"""Speculation changes nothing but the number of steps: tokens, logprob bits and ends are those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sequence import FinishReason
from pd_engine.sequence import Sequence as Choice
from pd_engine.steps import decode
from pd_engine.steps.decode import decode_step, num_slots_needed
from pd_engine.steps.draft import MAX_WAITING_STATES, draft_tokens, let_go, pending_states
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.rows import Span, build_step, token_ids
from pd_engine.steps.speculation import MAX_TRIAL_INTERVAL, SpeculationPolicy
from pd_engine.steps.state import can_draft
from support.engine_cases import (
    all_hidden,
    assert_mtp_slots_are_true,
    load_engine,
    mtp_hidden,
    new_sequence,
    random_ids,
    release,
    release_all,
)
from support.engine_play import Answer, Player, Request, alone, together

GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 3}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 2**63 + 11, "logprobs": 3}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model whose drafts are mostly accepted."""
    path = tmp_path_factory.mktemp("agreeing") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=3, layer_scale=0.12)
    return load_engine(path)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_any_number_of_drafts_gives_the_plain_answer(engine: Engine, params: dict[str, Any]) -> None:
    request = Request(prompt=tuple(random_ids(320, 13)), params=params | {"max_tokens": 40})
    want = alone(engine, request)
    player = Player(engine)
    for speculate in (1, 2, 3, 5, 8):
        player.add(request, speculate=speculate)
    player.prefill(dict.fromkeys(range(5), 13))
    assert player.finish() == [want] * 5
    for sequence in player.sequences:
        assert sequence.num_accepted > 10, "most first drafts are right"
        assert sequence.num_drafted > sequence.num_accepted, "and some are wrong"
    assert player.longest[:3] == [2, 3, 4], "later drafts are right too, so they are sampled with their own noise"


@pytest.mark.parametrize("name", ["base", "odd", "no-q-lora-one-group", "demo"])
def test_models_of_other_shapes(name: str, engines: dict[str, Engine]) -> None:
    engine = engines[name]
    request = Request(prompt=tuple(random_ids(engine.config.vocab_size, 17)), params=SEEDED | {"max_tokens": 12})
    assert alone(engine, request, speculate=3) == alone(engine, request)


def test_bf16(checkpoints: dict[str, Path]) -> None:
    engine = load_engine(checkpoints["base"], dtype="bf16")
    for params in (GREEDY, SEEDED):
        request = Request(prompt=tuple(random_ids(320, 70)), params=params | {"max_tokens": 12})
        assert alone(engine, request, speculate=2, sizes=[33, 1, 36]) == alone(engine, request)


@pytest.mark.parametrize("speculate", [1, 4])
def test_every_max_tokens(engine: Engine, speculate: int) -> None:
    prompt = tuple(random_ids(320, 9))
    whole = alone(engine, Request(prompt=prompt, params=GREEDY | {"max_tokens": 16}))
    requests = [Request(prompt=prompt, params=GREEDY | {"max_tokens": count}) for count in range(1, 17)]
    for count, answer in enumerate(together(engine, requests, speculate=[speculate] * 16), start=1):
        assert answer.tokens == whole.tokens[:count]
        assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("speculate", [0, 1, 4])
def test_every_place_of_a_stop_token(engine: Engine, speculate: int) -> None:
    prompt = tuple(random_ids(320, 9))
    whole = alone(engine, Request(prompt=prompt, params=SEEDED | {"max_tokens": 16}))
    places = {token.token_id: place for place, token in reversed(list(enumerate(whole.tokens)))}
    assert len(places) > 8
    requests = [
        Request(prompt=prompt, params=SEEDED | {"max_tokens": 16}, ending_ids=frozenset([stop])) for stop in places
    ]
    answers = together(engine, requests, speculate=[speculate] * len(requests))
    for place, answer in zip(places.values(), answers, strict=True):
        assert answer.tokens == whole.tokens[: place + 1]
        assert answer.finish_reason is FinishReason.STOP


def test_the_context_ends_it(checkpoints: dict[str, Path]) -> None:
    limited, free = load_engine(checkpoints["base"], max_context_length=32), load_engine(checkpoints["base"])
    requests = [
        Request(prompt=tuple(random_ids(320, length)), params=GREEDY | {"max_tokens": 16})
        for length in (20, 30, 31, 32)
    ]
    whole = together(free, requests, speculate=[0] * 4)
    for speculate in (0, 1, 4):
        answers = together(limited, requests, speculate=[speculate] * 4)
        for request, answer, want in zip(requests, answers, whole, strict=True):
            assert answer.tokens == want.tokens[: max(1, 32 - len(request.prompt))]
            assert answer.finish_reason is FinishReason.LENGTH


def test_a_batch_of_mixed_requests(engine: Engine) -> None:
    """Greedy and seeded, with and without drafts and logprobs, ends at different times: all as if alone."""
    requests = [
        Request(
            prompt=tuple(random_ids(320, 5 + 7 * number, seed=number)),
            params=(GREEDY if number % 2 else SEEDED | {"seed": number}) | {
                "max_tokens": 4 + 5 * number, "logprobs": None if number == 2 else number,
            },
        )
        for number in range(5)
    ]
    answers = together(engine, requests, speculate=[0, 1, 4, 2, 8])
    assert answers == [alone(engine, request) for request in requests]


def test_mtp_slots_are_true_after_each_step(engine: Engine) -> None:
    """Whatever was drafted, MTP's slots up to num_computed_mtp are those of true states."""
    sequence = new_sequence(engine, random_ids(320, 11), speculate=5, max_tokens=40)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=11)])
    sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        decode_step(engine, [sequence])
    assert sequence.num_computed_mtp > 30
    assert sequence.num_computed_mtp == sequence.num_computed, "its full blocks are whole"
    assert_mtp_slots_are_true(engine, sequence)
    release(engine, sequence)


@pytest.mark.parametrize("num_last", [1, 2, 19])
def test_rows_that_are_only_remembered_stop_at_their_slots(engine: Engine, num_last: int) -> None:
    """MTP's last rows have the bits that they have among rows which all go through the layer, and so have all slots."""
    assert engine.mtp is not None
    sequence = new_sequence(engine, random_ids(320, 20))
    hidden_TD = all_hidden(engine, sequence, [20])
    states_TD = mtp_hidden(engine, sequence, hidden_TD, [19])
    component = engine.arena.components[-1]
    slots = component[sequence.block_ids].clone()
    component[sequence.block_ids] = float("nan")
    component[sequence.block_ids[0], 0] = slots[0, 0]
    spans = [Span(sequence=sequence, start=1, count=19)]
    step = build_step(spans, engine.layout.block_size)
    last_SD = engine.mtp.forward(token_ids(spans), hidden_TD[:19], step, engine.mtp_cache, num_last=num_last)
    assert torch.equal(last_SD, states_TD[-num_last:])
    written = component[sequence.block_ids].flatten(0, 1)[:20]
    assert torch.equal(written[1:], slots.flatten(0, 1)[1:20])
    component[sequence.block_ids] = 0
    release(engine, sequence)


def test_drafts_stay_within_the_slots_that_are_asked_for(engine: Engine) -> None:
    """With blocks for exactly `num_slots_needed` and poison in every other block, nothing else is written or read."""
    request = Request(prompt=tuple(random_ids(320, 15)), params=GREEDY | {"max_tokens": 30})
    want = alone(engine, request)
    sequence = new_sequence(engine, request.prompt, speculate=4, num_blocks=1, **request.params)
    spare = engine.pool.allocate(engine.pool.num_free, "spare")
    for component in engine.arena.components:
        component[spare] = float("nan")
        component[sequence.block_ids] = float("nan")
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=15)])
    tokens = sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        while len(sequence.block_ids) < engine.layout.num_blocks_for(num_slots_needed(sequence)):
            sequence.block_ids.append(spare.pop(0))
        [output] = decode_step(engine, [sequence])
        tokens += output.tokens
    assert tuple(tokens) == want.tokens
    assert num_slots_needed(sequence) <= len(request.prompt) + 30
    for component in engine.arena.components:
        assert component[spare].isnan().all()
    release_all(engine)
    for component in engine.arena.components:
        component.zero_()


def test_decoding_without_drafts_ends_speculation(engine: Engine) -> None:
    """MTP's slots then stop where they are, and asking for drafts later gives none: the answer stays the same."""
    request = Request(prompt=tuple(random_ids(320, 12)), params=GREEDY | {"max_tokens": 20})
    player = Player(engine)
    player.add(request, speculate=0)
    player.prefill({0: 12})
    [sequence] = player.sequences
    assert can_draft(sequence)
    player.decode([0])
    player.decode([0])
    assert not can_draft(sequence)
    assert sequence.num_computed_mtp == 12
    sequence.speculate = 3
    [answer] = player.finish()
    assert sequence.num_drafted == 0
    assert answer == alone(engine, request)


def test_the_number_of_drafts_may_change_at_every_step(engine: Engine) -> None:
    """Off for some steps and on again, the MTP layer catches up; off for long, it keeps up, with few states waiting."""
    request = Request(prompt=tuple(random_ids(320, 12)), params=SEEDED | {"max_tokens": 300})
    want = [token.token_id for token in alone(engine, request).tokens]
    sequence = new_sequence(engine, request.prompt, speculate=8, **request.params)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=12)])
    sample_first(engine, [sequence])
    for limit in [3, 0, 0, 1, *[0] * 60, 8, 2, 0, 1]:
        before = sequence.num_drafted
        [output] = decode_step(engine, [sequence], limit)
        assert sequence.num_drafted - before == output.num_drafted == limit
    for _ in range(2 * MAX_WAITING_STATES):
        decode_step(engine, [sequence], 0)
        assert can_draft(sequence)
        assert len(pending_states(sequence)) <= MAX_WAITING_STATES
    assert_mtp_slots_are_true(engine, sequence)
    [output] = decode_step(engine, [sequence], 8)
    assert output.num_drafted == 8
    assert_mtp_slots_are_true(engine, sequence)
    while sequence.finish_reason() is None:
        decode_step(engine, [sequence], 0 if sequence.num_generated > 280 else 8)
    assert sequence.num_computed_mtp == sequence.num_computed
    assert_mtp_slots_are_true(engine, sequence)
    assert sequence.generated_ids == want
    assert sequence.num_accepted > 2
    release(engine, sequence)


def test_drafts_come_back_to_a_sequence_when_they_are_accepted_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence, its policy, and drafts that are wrong for longer than trials are ever apart."""
    def wrong(engine: Engine, sequences: list[Choice], max_drafts: int) -> list[list[int]]:
        return [[(token + 1) % 320 for token in tokens] for tokens in draft_tokens(engine, sequences, max_drafts)]

    params = SEEDED | {"max_tokens": 900, "logprobs": None}
    sequence = new_sequence(engine, random_ids(320, 12), speculate=1, **params)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=12)])
    sample_first(engine, [sequence])
    policy = SpeculationPolicy(1)

    def num_drafted(num_steps: int) -> int:
        before = sequence.num_drafted
        for _ in range(num_steps):
            [output] = decode_step(engine, [sequence], policy.choose(1))
            policy.record(1, 1.0 + 0.3 * output.num_drafted, [output.num_drafted], [output.num_accepted])
        return sequence.num_drafted - before

    num_drafted(60)
    assert num_drafted(20) > 10, "most are accepted"
    monkeypatch.setattr(decode, "draft_tokens", wrong)
    num_drafted(100)
    assert num_drafted(200) < 30
    monkeypatch.setattr(decode, "draft_tokens", draft_tokens)
    num_drafted(MAX_TRIAL_INTERVAL // 2)
    assert num_drafted(30) > 15, "it drafts again"
    release(engine, sequence)


def test_sequences_that_began_together_catch_up_one_after_the_other(engine: Engine) -> None:
    sequences = [
        new_sequence(engine, random_ids(320, 3, seed=number), name=f"s{number}", speculate=1, max_tokens=100)
        for number in range(40)
    ]
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=3) for sequence in sequences])
    sample_first(engine, sequences)
    for _ in range(90):
        before = [sequence.num_computed_mtp for sequence in sequences]
        decode_step(engine, sequences, 0)
        num_caught_up = sum(now.num_computed_mtp > then for now, then in zip(sequences, before, strict=True))
        assert num_caught_up <= 2
        assert max(len(pending_states(sequence)) for sequence in sequences) <= MAX_WAITING_STATES
    assert all(can_draft(sequence) and sequence.num_computed_mtp > 3 for sequence in sequences)
    release(engine, *sequences)


def test_states_that_will_never_be_wanted_are_given_up(engine: Engine) -> None:
    sequence = new_sequence(engine, random_ids(320, 12), speculate=1, max_tokens=60)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=12)])
    sample_first(engine, [sequence])
    for _ in range(50):
        let_go([sequence])
        decode_step(engine, [sequence], 0)
    assert (can_draft(sequence), len(pending_states(sequence))) == (False, 1)
    assert sequence.num_computed_mtp == 12, "nothing was computed for them"
    [output] = decode_step(engine, [sequence], 1)
    assert output.num_drafted == 0
    release(engine, sequence)


def test_engines_without_mtp_give_the_same_answer(checkpoints: dict[str, Path]) -> None:
    request = Request(prompt=tuple(random_ids(320, 21)), params=SEEDED | {"max_tokens": 20})
    without = alone(load_engine(checkpoints["base"], max_speculate=0), request, speculate=2)
    with_mtp = alone(load_engine(checkpoints["base"]), request, speculate=2)
    assert without.tokens == with_mtp.tokens
    assert without.prompt_checksums == with_mtp.prompt_checksums[: len(without.prompt_checksums)]


def test_expanded_prompts_decode_in_the_absorbed_form(checkpoints: dict[str, Path]) -> None:
    """A replay of emitted tokens gives the bits that decoding gave, since generated positions are never expanded."""
    engine = load_engine(checkpoints["base"], prefill_form="expanded")
    request = Request(prompt=tuple(random_ids(320, 70)), params=SEEDED | {"max_tokens": 20})
    answer = alone(engine, request, speculate=2)
    assert answer == alone(engine, request)
    ids = [token.token_id for token in answer.tokens]
    assert _resumed(engine, request, ids, 7) == answer.tokens[7:]


def test_a_resumed_sequence_goes_on_with_the_same_tokens(engine: Engine) -> None:
    request = Request(prompt=tuple(random_ids(320, 40)), params=SEEDED | {"max_tokens": 20})
    answer = alone(engine, request)
    ids = [token.token_id for token in answer.tokens]
    for emitted in (1, 2, 10, 19):
        assert _resumed(engine, request, ids, emitted) == answer.tokens[emitted:]


def _resumed(engine: Engine, request: Request, ids: list[int], emitted: int) -> Any:
    """What follows when prompt and emitted tokens are prefilled in two chunks elsewhere."""
    sequence = new_sequence(
        engine, [*request.prompt, *ids[:emitted]], name="resumed", num_prompt_tokens=len(request.prompt), speculate=2,
        **request.params,
    )
    for size in (33, sequence.num_tokens - 33):
        prefill_step(engine, [Chunk(sequence=sequence, num_tokens=size)])
    tokens = sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        [output] = decode_step(engine, [sequence])
        tokens += output.tokens
    release(engine, sequence)
    return tuple(tokens)


def test_answers_compare_bits(engine: Engine) -> None:
    """The comparison itself: another seed gives another answer."""
    prompt = tuple(random_ids(320, 12))
    answers: list[Answer] = [
        alone(engine, Request(prompt=prompt, params=SEEDED | {"seed": seed, "max_tokens": 20})) for seed in (1, 2)
    ]
    assert answers[0] != answers[1]
    assert answers[0].prompt_checksums == answers[1].prompt_checksums
