"""A request's answer does not depend on company: any batches, any chunks, any drafts, any blocks give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from support.engine_cases import available_ops, load_engine, random_ids, release_all
from support.engine_play import Answer, Player, Request, alone

LENGTHS = (3, 17, 66, 1)  # within a block, over a block, over a tile of keys, one token
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 14, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 7, "max_tokens": 9, "logprobs": 0},
    {"temperature": 0.7, "top_k": 20, "seed": 2**64 - 1, "max_tokens": 12, "logprobs": 1},
    {"temperature": 0.0, "max_tokens": 6},
)
REQUESTS = tuple(
    Request(prompt=tuple(random_ids(320, length, seed=number)), params=params)
    for number, (length, params) in enumerate(zip(LENGTHS, PARAMS, strict=True))
)
FORMS = [("fp32", "absorbed"), ("bf16", "absorbed"), ("bf16", "expanded"), ("fp16", "absorbed")]


def case(ops: str, dtype: str, form: str) -> Any:
    """The reference, which is slow, in one form where there are compiled ops."""
    is_slow = ops == "reference" and len(available_ops()) > 1 and (dtype, form) != ("bf16", "absorbed")
    return pytest.param((ops, dtype, form), id=f"{ops}-{dtype}-{form}", marks=[pytest.mark.slow] if is_slow else [])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the first dense; most drafts are accepted."""
    path = tmp_path_factory.mktemp("rows") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=5, layer_scale=0.15)
    return path


@pytest.fixture(scope="module", params=[
    case(ops, *form) for ops in available_ops() for form in FORMS if ops == "reference" or "fp16" not in form
])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Engine:
    ops, dtype, prefill_form = request.param
    return load_engine(checkpoint, ops=ops, dtype=dtype, prefill_form=prefill_form)


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[Answer]:
    """Each request alone, its prompt in one chunk, without drafts."""
    return [alone(engine, request) for request in REQUESTS]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_schedule_gives_the_answers_of_requests_alone(
    engine: Engine, answers: list[Answer], data: st.DataObject
) -> None:
    """Prompts are cut at will and packed with others; decode steps take any of those that run, with any drafts."""
    release_all(engine)
    spare = engine.pool.allocate(data.draw(st.integers(0, 5), label="blocks held by others"), "others")
    player = Player(engine)
    for request in REQUESTS:
        player.add(request, speculate=data.draw(st.integers(0, 4), label="drafts"))
    waiting = set(range(len(REQUESTS)))
    while waiting:
        chosen = data.draw(st.sets(st.sampled_from(sorted(waiting)), min_size=1), label="prefilled")
        player.prefill({
            number: data.draw(st.integers(1, player.remaining(number)), label=f"tokens of {number}")
            for number in sorted(chosen)
        })
        waiting = {number for number in waiting if player.remaining(number)}
        running = player.running()
        if running and data.draw(st.booleans(), label="decode between"):
            player.decode(data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True), label="decoded"))
    while running := player.running():
        player.decode(data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True), label="decoded"))
    assert player.finish() == answers
    engine.pool.release(spare, "others")
