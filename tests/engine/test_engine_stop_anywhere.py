"""stop-anywhere: a stop string or stop token at every place of accepted runs ends as decoding without drafts ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_engine.engine import Engine
from pd_engine.generate import Generation, generate
from pd_engine.model.checkpoint import DEMO_PATH
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import FinishReason
from pd_engine.text.tokenizer import Tokenizer
from support.engine_cases import load_engine, random_ids

NUM_TOKENS = 9
PROMPT = random_ids(320, 9, seed=4)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model whose drafts are mostly accepted; its ids are bytes and short words of the demo's tokenizer."""
    path = tmp_path_factory.mktemp("stops") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=3, layer_scale=0.05)
    return load_engine(path)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_PATH)


def params(**changes: Any) -> SamplingParams:
    """Seeded, with a bias towards ASCII, so that the text has characters that a stop string can be."""
    chosen: dict[str, Any] = {
        "temperature": 0.6, "top_p": 0.95, "top_k": -1, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True,
        "logprobs": 1, "frequency_penalty": 0.5, "logit_bias": tuple((token, 3.0) for token in range(20, 100)),
    }
    return SamplingParams(**(chosen | changes))


def shown(answer: Generation) -> Generation:
    """All but the counts of drafts, which may differ."""
    return replace(answer, drafted_tokens=0, accepted_tokens=0)


def check(engine: Engine, tokenizer: Tokenizer, asked: SamplingParams, drafts: tuple[int, ...]) -> Generation:
    """The answer without drafts, to which those with drafts are equal."""
    plain = generate(engine, tokenizer, PROMPT, asked)
    for speculate in drafts:
        assert shown(generate(engine, tokenizer, PROMPT, asked, speculate=speculate)) == plain, (asked, speculate)
    return plain


def all_max_tokens(place: int) -> list[int]:
    """Around the place of a token; further ones differ in nothing that ends the request."""
    return [count for count in (place, place + 1, place + 2, NUM_TOKENS) if 1 <= count <= NUM_TOKENS]


def test_runs_of_accepted_drafts(engine: Engine, tokenizer: Tokenizer) -> None:
    """Else the tests below would show nothing: stops fall within what one step gives."""
    answer = generate(engine, tokenizer, PROMPT, params(), speculate=3)
    assert answer.accepted_tokens >= 6
    assert sum(char.isascii() for char in answer.text) >= 6


@pytest.mark.parametrize("min_tokens", [0, 4])
@pytest.mark.parametrize("drafts", [(3,), pytest.param((1, 2, 4, 8), marks=pytest.mark.slow)])
def test_every_stop_string(engine: Engine, tokenizer: Tokenizer, drafts: tuple[int, ...], min_tokens: int) -> None:
    """Cut from the very text, at every place, over one or two tokens; before min_tokens it is text."""
    whole = generate(engine, tokenizer, PROMPT, params())
    ends = [len(tokenizer.decode(whole.token_ids[:count])) for count in range(NUM_TOKENS + 1)]
    num_stopped = 0
    for place in range(NUM_TOKENS):
        for first in {place, max(0, place - 1)}:
            stop = whole.text[ends[first] : ends[place + 1]]
            if not stop:
                continue
            for max_tokens in all_max_tokens(place):
                asked = params(stop=(stop, "zzz"), max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
                answer = check(engine, tokenizer, asked, drafts)
                assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
                if answer.finish_reason is FinishReason.STOP:
                    num_stopped += 1
                    assert len(answer.token_ids) > asked.min_tokens
                    assert stop in tokenizer.decode(answer.token_ids)
                    assert answer.stop_reason == stop
    assert num_stopped > 15


@pytest.mark.parametrize("min_tokens", [0, 4])
@pytest.mark.parametrize("drafts", [(3,), pytest.param((1, 2, 4, 8), marks=pytest.mark.slow)])
def test_every_stop_token(engine: Engine, tokenizer: Tokenizer, drafts: tuple[int, ...], min_tokens: int) -> None:
    """At every place; before min_tokens another token comes instead, and what follows is another answer."""
    whole = generate(engine, tokenizer, PROMPT, params())
    for place, token in enumerate(whole.token_ids):
        for max_tokens in all_max_tokens(place):
            least = min(min_tokens, max_tokens)
            asked = params(stop_token_ids=(token,), max_tokens=max_tokens, min_tokens=least)
            answer = check(engine, tokenizer, asked, drafts)
            assert token not in answer.token_ids[: max(least, len(answer.token_ids) - 1)]
            first = whole.token_ids.index(token)
            if least <= first < max_tokens:
                assert answer.token_ids == whole.token_ids[: first + 1]
                assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, str(token))
