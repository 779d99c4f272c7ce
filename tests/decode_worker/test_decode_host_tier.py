"""A sequence that was in host memory between any two steps goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from decode_worker import host_tier
from decode_worker.host_tier import HostCopy, Mover
from decode_worker.runner import DecodeRunner, StepReport
from decode_worker.scheduler import Place
from pd_engine.cache.checksums import slot_checksums
from pd_engine.engine import Engine
from pd_engine.errors import ResourceExhausted
from pd_engine.model.checkpoint import resolve_model
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.settings import EngineSettings
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from support.engine_cases import new_sequence, release_all

NUM_TOKENS = 30
PROMPT = [5 + 7 * number % 900 for number in range(37)]


@pytest.fixture(scope="module", params=["auto", "fp8"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """The demo's slots, or the small ones of FP8."""
    return Engine.load(
        resolve_model("demo"), EngineSettings(cache_mib=4, latent_dtype=request.param), max_speculate=3
    )


def begun(engine: Engine, **params: Any) -> Sequence:
    """After its first token."""
    sampling = {"temperature": 0.8, "seed": 4, "max_tokens": NUM_TOKENS, "repetition_penalty": 1.2, "logprobs": 1}
    sequence = new_sequence(engine, PROMPT, name="moved", speculate=2, **(sampling | params))
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=len(PROMPT))])
    [first] = sample_first(engine, [sequence])
    assert sequence.token_ids[-1] == first.token_id
    return sequence


class Stage:
    """A runner with one sequence, and what it reports."""

    def __init__(self, engine: Engine, sequence: Sequence, move_bytes: int) -> None:
        self.engine, self.sequence = engine, sequence
        self.reports: list[StepReport] = []
        self.runner = DecodeRunner(engine, 4, self.reports.append, move_bytes=move_bytes)
        self.runner.add(sequence, Place())
        self.tokens: list[SampledToken] = []

    def step(self) -> StepReport:
        """One that reports something."""
        while True:
            assert self.runner.step(), "nothing is left to do"
            if self.reports:
                report = self.reports.pop()
                self.tokens += [token for item in report.progress for token in item.tokens]
                return report

    def checksums(self, num_final: int, num_final_mtp: int) -> list[int]:
        """Of all final slots: MTP's, which come last, may be fewer."""
        layout, block_ids = self.engine.layout, self.sequence.block_ids
        main = slot_checksums(self.engine.ops, self.engine.arena, block_ids, num_final)
        mtp = slot_checksums(self.engine.ops, self.engine.arena, block_ids, num_final_mtp)
        return main[: -layout.num_blocks_for(num_final)] + mtp[-layout.num_blocks_for(num_final_mtp) :]

    def go_and_come_back(self) -> None:
        """To other blocks; the old ones are overwritten meanwhile."""
        engine, old = self.engine, list(self.sequence.block_ids)
        num_final = self.sequence.num_computed, self.sequence.num_computed_mtp
        before = self.checksums(*num_final)
        self.runner.move_out("moved")
        [stored] = self.step().moved_out
        assert stored.sequence is self.sequence
        assert self.sequence.block_ids == []
        assert not self.runner.step(), "it is in no batch"
        for component in engine.arena.components:
            component[old] = 77
        engine.pool.release(old, "moved")
        self.runner.bring_back(stored, engine.pool.allocate(len(old), "moved"), 0)
        report = self.step()
        assert report.moved_back == ["moved"]
        assert self.sequence.block_ids != old
        assert report.progress, "it goes on at once"
        assert self.checksums(*num_final) == before


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Any:
    yield
    release_all(engine)


@pytest.mark.parametrize("move_bytes", [1, 10**9], ids=["block by block", "at once"])
def test_tokens_and_slots_are_those_of_one_that_never_left(engine: Engine, move_bytes: int) -> None:
    alone = Stage(engine, begun(engine), move_bytes)
    while alone.runner.step():
        pass
    expected = [token for report in alone.reports for item in report.progress for token in item.tokens]
    num_final = alone.sequence.num_computed, alone.sequence.num_computed_mtp
    slots = alone.checksums(*num_final)
    release_all(engine)
    moved = Stage(engine, begun(engine), move_bytes)
    while len(moved.tokens) < NUM_TOKENS - 1:
        moved.go_and_come_back()
        if len(moved.tokens) < NUM_TOKENS - 1:
            moved.step()
    assert moved.tokens == expected
    assert (moved.sequence.num_drafted, moved.sequence.num_accepted) == (
        alone.sequence.num_drafted, alone.sequence.num_accepted
    )
    assert moved.checksums(*num_final) == slots


def test_what_is_dropped_on_its_way_gives_its_memory_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out and back, with one block copied."""
    copies: list[HostCopy] = []

    class Watched(HostCopy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            copies.append(self)

    monkeypatch.setattr(host_tier, "HostCopy", Watched)
    sequence, mover = begun(engine), Mover(engine.arena, move_bytes=1)
    mover.move_out(sequence, 0)
    assert not mover.advance().out
    mover.drop("moved")
    assert copies.pop().is_closed
    assert not mover.is_busy
    mover.move_out(sequence, 0)
    block_ids = sequence.block_ids
    while not (out := mover.advance().out):
        assert mover.is_busy
    mover.bring_back(out[0], block_ids, 1)
    assert not mover.advance().back
    mover.drop("moved")
    assert copies.pop().is_closed
    assert not mover.is_busy


def test_without_memory_on_the_host_a_sequence_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **flags: Any) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    stage = Stage(engine, begun(engine), 10**9)
    monkeypatch.setattr(host_tier.mmap, "mmap", refuse)
    stage.runner.move_out("moved")
    error = stage.step().failed["moved"]
    assert isinstance(error, ResourceExhausted)
    assert error.retryable
    assert "bytes of host memory" in error.message
    assert not stage.runner.step()


def test_a_sequence_without_blocks_for_a_step_waits_for_them(engine: Engine) -> None:
    sequence = begun(engine)
    kept, granted = sequence.block_ids[:3], sequence.block_ids[3:]
    sequence.block_ids = kept
    stage = Stage(engine, sequence, 10**9)
    while stage.runner.step():
        pass
    assert len(PROMPT) < sequence.num_tokens <= 3 * engine.layout.block_size
    stage.runner.grant("moved", granted)
    while stage.runner.step():
        pass
    assert sequence.num_generated == NUM_TOKENS
