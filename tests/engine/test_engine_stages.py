"""Watched steps: the same bits, every stage timed, every token's experts counted, and only one step in so many."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_engine.engine import Engine
from pd_engine.sequence import Sequence
from pd_engine.service.stage_names import Stage
from pd_engine.stages import StageTotals, watched
from pd_engine.steps.forward import THE_MODEL, Steps
from pd_engine.steps.prefill import Chunk
from support.engine_cases import available_ops, load_engine, new_sequence, release, write_case

PROMPT = [3, 17, 40, 9, 120, 77, 5, 66, 14, 15, 16, 33]
NUM_STEPS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("stages"), "base")


def run(engine: Engine, steps: Steps) -> Sequence:
    """One prompt in two chunks, then `NUM_STEPS` decode steps."""
    sequence = new_sequence(engine, PROMPT, speculate=1)
    for _ in range(2):
        steps.prefill(engine, [Chunk(sequence=sequence, num_tokens=len(PROMPT) // 2)], lambda component: None)
    steps.sample_first(engine, [sequence])
    for _ in range(NUM_STEPS):
        steps.decode(engine, [sequence], 1)
    release(engine, sequence)
    return sequence


@pytest.mark.parametrize("ops", available_ops())
def test_the_same_tokens_and_all_stages(checkpoint: Path, ops: str) -> None:
    engine = load_engine(checkpoint, ops=ops)
    totals = StageTotals()
    plain = run(engine, THE_MODEL)
    seen = run(engine, watched(THE_MODEL, totals, 1))
    assert seen.token_ids == plain.token_ids
    assert (seen.num_drafted, seen.num_accepted) == (plain.num_drafted, plain.num_accepted)
    assert totals.num_steps == 2 + NUM_STEPS
    assert set(totals.seconds) == set(Stage) - {Stage.TOKENIZE, Stage.STREAMING}
    assert all(seconds > 0 for seconds in totals.seconds.values()), totals.seconds
    assert sum(totals.seconds.values()) < totals.step_seconds
    config = engine.config
    assert config.n_routed_experts is not None
    layers = config.num_hidden_layers - config.first_k_dense_replace + 1  # and MTP's
    assert len(totals.experts) == layers
    for row in totals.experts:
        assert len(row) == config.n_routed_experts
        assert row.sum() % config.num_experts_per_token == 0
    num_rows = totals.experts[0].sum() // config.num_experts_per_token
    assert num_rows == len(PROMPT) + NUM_STEPS + seen.num_drafted, "each computed row once"


def test_one_in_so_many_and_none(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    totals = StageTotals()
    run(engine, watched(THE_MODEL, totals, 4))
    assert totals.num_steps == NUM_STEPS // 4
    assert watched(THE_MODEL, totals, 0) is THE_MODEL
    assert not StageTotals().loads().stages
    reply = totals.loads()
    assert {time.stage for time in reply.stages} == {stage.value for stage in totals.seconds}
    assert (reply.num_watched_steps, reply.watched_seconds) == (totals.num_steps, totals.step_seconds)
    assert [list(row.tokens) for row in totals.details().experts] == [list(row) for row in totals.experts]
