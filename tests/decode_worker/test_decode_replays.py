"""Sequences that were made to give up what drafts need have it back where drafts pay after all, and at their ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from decode_worker.itl_budget import ItlBudget
from decode_worker.replays import WORTH_TOKENS, Replays, is_worth_it
from decode_worker.runner import DecodeRunner, StepReport
from decode_worker.scheduler import Place
from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sequence import Sequence
from pd_engine.steps.decode import DecodeOutput, try_decode_step
from pd_engine.steps.draft import let_go
from pd_engine.steps.forward import Steps
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.speculation import SpeculationPolicy
from pd_engine.steps.state import can_draft
from support.engine_cases import assert_mtp_slots_are_true, load_engine, new_sequence, random_ids, release_all

STEP_S = 0.001


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model whose drafts are mostly accepted, with a long context."""
    path = tmp_path_factory.mktemp("agreeing") / "model"
    write_random_checkpoint(
        path, {"num_hidden_layers": 2, "max_position_embeddings": 4096}, seed=3, layer_scale=0.12
    )
    return load_engine(path)


@pytest.fixture
def engine(agreeing: Engine) -> Iterator[Engine]:
    yield agreeing
    release_all(agreeing)


def begun(engine: Engine, name: str, max_tokens: int) -> Sequence:
    sequence = new_sequence(
        engine, random_ids(320, 12, seed=len(name)), name=name, speculate=1, max_tokens=max_tokens, temperature=0.9,
        seed=5,
    )
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=12)])
    sample_first(engine, [sequence])
    return sequence


@dataclass
class Host:
    """A runner on a host where a draft of every sequence takes `draft_cost` plain steps."""

    engine: Engine
    draft_cost: float = 0.0
    now_s: float = 0.0
    reports: list[StepReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = DecodeRunner(
            self.engine, 4, self.reports.append, SpeculationPolicy(1),
            steps=Steps(decode=self.decode, clock=lambda: self.now_s),
        )

    def decode(self, engine: Engine, sequences: list[Sequence], max_drafts: int) -> list[DecodeOutput | Internal]:
        outcomes = try_decode_step(engine, sequences, max_drafts)
        num_drafted = sum(outcome.num_drafted for outcome in outcomes if isinstance(outcome, DecodeOutput))
        self.now_s += STEP_S * (1 + self.draft_cost * num_drafted / len(sequences))
        return outcomes

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert self.runner.step()


def test_drafts_come_back_to_one_that_had_given_up_its_states(engine: Engine) -> None:
    """Drafts are hopeless until its states are gone; then they pay for a newcomer, and so for it as well."""
    host = Host(engine, draft_cost=3.0)
    old = begun(engine, "old", 1_500)
    host.runner.add(old, Place(arrival=0))
    host.steps(230)
    assert not can_draft(old)
    num_final, num_drafted = old.num_computed_mtp, old.num_drafted
    assert is_worth_it(old)
    host.draft_cost = 0.2
    host.runner.add(begun(engine, "newcomer", 400), Place(arrival=1))
    host.steps(120)
    assert can_draft(old)
    assert old.num_computed_mtp > num_final + 150
    assert old.num_drafted > num_drafted + 20
    assert not [report.failed for report in host.reports if report.failed]
    assert_mtp_slots_are_true(engine, old)
    alone = begun(engine, "old", 1_500)
    while alone.num_tokens < old.num_tokens:
        assert isinstance(try_decode_step(engine, [alone], 0)[0], DecodeOutput)
    assert alone.token_ids == old.token_ids


def test_one_near_its_end_does_without(engine: Engine) -> None:
    sequence = begun(engine, "short", 200)
    for _ in range(60):
        let_go([sequence])
        try_decode_step(engine, [sequence], 0)
    num_missing = sequence.num_computed - sequence.num_computed_mtp
    assert num_missing == 60
    assert not is_worth_it(sequence), "139 are to come"
    sequence.params = replace(sequence.params, max_tokens=61 + 60 * WORTH_TOKENS)
    assert is_worth_it(sequence)
    sequence.speculate = 0
    assert not is_worth_it(sequence)


@pytest.mark.parametrize("num_steps", [0, 1, 20, 50])
def test_one_that_is_dropped_has_all_its_mtp_slots(engine: Engine, num_steps: int) -> None:
    """Whatever waited for drafts then: the next turn goes on from its blocks."""
    runner = DecodeRunner(
        engine, 4, lambda report: None, steps=Steps(decode=lambda *args: try_decode_step(*args[:2], 0))
    )
    sequence = begun(engine, "dropped", 100)
    runner.add(sequence, Place())
    for _ in range(num_steps):
        runner.step()
    assert runner.drop("dropped") == sequence.num_computed == 12 + num_steps
    assert_mtp_slots_are_true(engine, sequence)
    assert runner.drop("dropped") is None
    assert not runner.step()


def out_of_memory(*args: object) -> None:
    raise MemoryError


def test_one_whose_replay_fails_goes_on_without_drafts(engine: Engine) -> None:
    sequence = begun(engine, "unlucky", 1_500)
    for _ in range(60):
        let_go([sequence])
        try_decode_step(engine, [sequence], 0)
    assert is_worth_it(sequence)
    Replays(engine, Steps(prefill=out_of_memory), ItlBudget()).advance([sequence], STEP_S)
    assert not is_worth_it(sequence), "it is not tried again"
    assert isinstance(try_decode_step(engine, [sequence], 1)[0], DecodeOutput)


def test_one_whose_last_mtp_slots_cannot_be_written_is_dropped_all_the_same(engine: Engine) -> None:
    runner = DecodeRunner(engine, 4, lambda report: None, steps=Steps(catch_up=out_of_memory))
    runner.add(begun(engine, "dropped", 100), Place())
    assert runner.drop("dropped") is None
    assert not runner.step()
