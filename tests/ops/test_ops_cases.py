"""The requests of a verification run cover what they must, and are the same every time."""

from __future__ import annotations

import pytest

from pd_ops.request_options import TextPrompt, TokensPrompt
from pd_ops.verification.cases import MAX_NEW_TOKENS, Case, CaseLimits, Phase, make_cases
from pd_ops.verification.pressed import MAX_DEMAND_TOKENS, NUM_AT_ONCE, pressed_cases
from pd_ops.verification.resumed import resumed_cases
from pd_ops.verification.splits import split_cases
from pd_ops.verification.warm import FinishedCase, warm_cases

LIMITS = CaseLimits(vocab_size=4096, max_context_length=4096, block_size=16, chunk_tokens=256, max_speculate=1)


def num_bytes_or_tokens(case: Case) -> int:
    match case.prompt:
        case TokensPrompt():
            return len(case.prompt.token_ids)
        case TextPrompt():
            return len(case.prompt.text.encode()) + 1  # a token is a byte at least, and BOS is one
    raise AssertionError(case.prompt)


def test_the_same_seed_gives_the_same_cases() -> None:
    assert make_cases(20, 7, LIMITS) == make_cases(20, 7, LIMITS)
    assert make_cases(20, 7, LIMITS) != make_cases(20, 8, LIMITS)


def test_fifty_cases_cover_lengths_and_modes() -> None:
    cases = make_cases(50, 0, LIMITS)
    lengths = {len(case.prompt.token_ids) for case in cases if isinstance(case.prompt, TokensPrompt)}
    assert {1, 1000} <= {num_bytes_or_tokens(case) for case in cases}
    assert len(lengths) > 20
    assert max(map(num_bytes_or_tokens, cases)) <= 1000
    assert len({case.mode for case in cases}) == 4
    assert any(isinstance(case.prompt, TextPrompt) for case in cases)
    assert any(not case.sampling.ignore_eos for case in cases)
    assert all(case.sampling.logprobs is not None and case.sampling.seed is not None for case in cases)
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"):
        assert sum(bool(getattr(case.sampling, name)) for case in cases) >= 2, name


@pytest.mark.parametrize("seed", range(20))
def test_every_case_fits_a_small_model(seed: int) -> None:
    limits = CaseLimits(vocab_size=261, max_context_length=100, block_size=16, chunk_tokens=8, max_speculate=0)
    for case in make_cases(30, seed, limits):
        assert 1 <= num_bytes_or_tokens(case) <= 100 - MAX_NEW_TOKENS
        assert case.sampling.max_tokens is not None
        assert 1 <= case.sampling.max_tokens <= MAX_NEW_TOKENS
        assert not case.speculates
        if isinstance(case.prompt, TokensPrompt):
            assert all(0 <= token < 261 for token in case.prompt.token_ids)


def finished(number: int, num_prompt_tokens: int, num_tokens: int) -> FinishedCase:
    ids = tuple(range(100 * number, 100 * number + num_prompt_tokens + num_tokens))
    return FinishedCase(number=number, prompt_ids=ids[:num_prompt_tokens], token_ids=ids[num_prompt_tokens:])


def test_warm_cases_begin_like_earlier_ones_up_to_the_edges_of_blocks_and_any_token_of_an_answer() -> None:
    earlier = [finished(0, 40, 12), finished(1, 33, 1), finished(2, 1, 1)]
    cases = warm_cases(earlier, 120, 5, LIMITS)
    assert cases == warm_cases(earlier, 120, 5, LIMITS)
    assert [case.number for case in cases] == list(range(3, 123))
    offsets, emitted = set(), set()
    for case in cases:
        assert isinstance(case.prompt, TokensPrompt)
        assert case.follows is not None
        base, ids = earlier[case.follows], case.prompt.token_ids
        whole = base.prompt_ids + base.token_ids
        length = min(len(ids), len(whole))
        shared = next((place for place in range(length) if ids[place] != whole[place]), length)
        assert ids
        if (case.number - 3) % 2 == 0:
            emitted.add((case.follows, shared - len(base.prompt_ids)))
        else:
            offsets.add(shared % 16)
        assert case.phase is Phase.WARM
        assert "warm: " in case.mode
    assert {15, 0, 1} <= offsets
    assert {(0, 0), (0, 12)} <= emitted
    assert len(emitted) > 8


def test_warm_cases_leave_room_for_an_answer() -> None:
    limits = CaseLimits(vocab_size=261, max_context_length=100, block_size=16, chunk_tokens=8, max_speculate=0)
    for case in warm_cases([finished(0, 60, 32)], 40, 1, limits):
        assert isinstance(case.prompt, TokensPrompt)
        assert 1 <= len(case.prompt.token_ids) <= 100 - MAX_NEW_TOKENS


def test_splits_cut_a_prompt_at_every_token_and_share_blocks_with_nobody_else() -> None:
    leading, following = split_cases(2, 30, 4, LIMITS)
    assert (leading, following) == split_cases(2, 30, 4, LIMITS)
    assert [case.number for case in leading + following] == list(range(30, 30 + 2 * 2 * 34))
    assert len({case.cache_salt for case in leading}) == len(leading)
    cuts = []
    for lead, case in zip(leading, following, strict=True):
        assert isinstance(lead.prompt, TokensPrompt)
        assert isinstance(case.prompt, TokensPrompt)
        beginning, whole = lead.prompt.token_ids, case.prompt.token_ids
        assert whole[: len(beginning)] == beginning
        assert (case.follows, case.cache_salt) == (lead.number, lead.cache_salt)
        assert lead.follows is None
        cuts.append((whole, len(beginning)))
    assert len(set(cuts)) == len(cuts) == 2 * 34
    assert {length for _, length in cuts} == set(range(1, 35))


@pytest.mark.parametrize("num_room_tokens", [300, 2048, 4096])
def test_pressed_cases_outgrow_the_room_together_but_none_does_alone(num_room_tokens: int) -> None:
    cases = pressed_cases(num_room_tokens, 7, 1, LIMITS)
    if num_room_tokens < 1_000:
        assert not cases, "each would be all prompt"
        return
    lengths = [num_bytes_or_tokens(case) + (case.sampling.max_tokens or 0) for case in cases]
    assert [case.number for case in cases] == list(range(7, 7 + NUM_AT_ONCE))
    assert sum(lengths) > 1.9 * num_room_tokens
    assert max(lengths) <= min(num_room_tokens, LIMITS.max_context_length)
    assert all(case.sampling.ignore_eos for case in cases)


def test_a_large_room_is_not_outgrown() -> None:
    assert not pressed_cases(MAX_DEMAND_TOKENS, 0, 1, LIMITS)


def test_resumed_cases_begin_after_every_token_of_the_longest_answers_of_each_mode() -> None:
    cases = make_cases(4, 1, LIMITS)
    earlier = [finished(case.number, 9, 5 + case.number) for case in cases]
    assert len({case.mode for case in cases}) == 4
    resumed = resumed_cases(cases, earlier, 2, 30)
    assert [case.number for case in resumed] == list(range(30, 30 + 9 + 8))
    by_base = {base: [case for case in resumed if case.follows == base] for base in (3, 2)}
    for base, again in by_base.items():
        assert [case.emitted for case in again] == [earlier[base].token_ids[:count] for count in range(6 + base)]
        assert all(case.prompt == TokensPrompt(token_ids=earlier[base].prompt_ids) for case in again)
        assert all(case.sampling.seed == cases[base].sampling.seed and case.sampling.logprobs is None for case in again)
