"""Requests with any processors, in any company, cut and drafted at will: tokens and logprob bits of each one alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from support.engine_cases import available_ops, load_engine, random_ids, release_all
from support.engine_play import Player, Request, alone

VOCAB_SIZE = 320


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.slow] if name == "reference" and len(available_ops()) > 1 else [])
    for name in available_ops()
])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Two layers; most drafts are accepted."""
    path = tmp_path_factory.mktemp("sampling") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=5, layer_scale=0.15)
    return load_engine(path, ops=request.param)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A short prompt, and of every processor none, little or much."""
    max_tokens = draw(st.integers(1, 12))
    biased = draw(st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-8, 8, width=32), max_size=20))
    params = {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])), "seed": draw(st.integers(0, 2**64 - 1)),
        "top_p": draw(st.sampled_from([1.0, 0.9])), "top_k": draw(st.sampled_from([-1, 30])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 0.5])), "logit_bias": tuple(biased.items()),
        "repetition_penalty": draw(st.sampled_from([1.0, 0.8, 1.3])),
        "presence_penalty": draw(st.sampled_from([0.0, -0.5, 1.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.5, 1.0])),
        "max_tokens": max_tokens, "min_tokens": draw(st.integers(0, max_tokens)),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
    }
    prompt = random_ids(VOCAB_SIZE, draw(st.integers(1, 40)), seed=draw(st.integers(0, 50)))
    return Request(
        prompt=tuple(prompt), params=params, ending_ids=frozenset(range(draw(st.integers(2, 30)), VOCAB_SIZE, 9))
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(asked=st.lists(requests(), min_size=1, max_size=5), data=st.data())
def test_any_processors_and_any_schedule(engine: Engine, asked: list[Request], data: st.DataObject) -> None:
    """Prompts are cut at will and packed with others; decode steps take any of those that run, with any drafts."""
    release_all(engine)
    want = [alone(engine, request) for request in asked]
    player = Player(engine)
    for request in asked:
        player.add(request, speculate=data.draw(st.integers(0, 8), label="drafts"))
    waiting = set(range(len(asked)))
    while waiting or player.running():
        if waiting:
            chosen = data.draw(st.sets(st.sampled_from(sorted(waiting)), min_size=1), label="prefilled")
            player.prefill({
                number: data.draw(st.integers(1, player.remaining(number)), label=f"tokens of {number}")
                for number in sorted(chosen)
            })
            waiting = {number for number in waiting if player.remaining(number)}
        running = player.running()
        if running:
            player.decode(data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True), label="decoded"))
    assert player.finish() == want
