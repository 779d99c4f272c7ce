"""The requests of a verification run cover what they must, and are the same every time."""

from __future__ import annotations

import pytest

from pd_ops.request_options import TextPrompt, TokensPrompt
from pd_ops.verification.cases import MAX_NEW_TOKENS, Case, CaseLimits, make_cases

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
