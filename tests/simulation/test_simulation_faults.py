"""Whole clusters on a virtual clock, with faults: every request is answered as by one process, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kv_transfer.source_book import SourceBook
from pd_ops.simulation.cluster import SimulatedCluster
from pd_ops.simulation.faults import Trouble
from pd_ops.simulation.members import SimulatedWorker
from pd_ops.simulation.run import play, play_all
from pd_ops.simulation.world import World

SEEDS = range(200)
MANY_SEEDS = range(200, 10_000)
SEEDS_A_PART = 400  # a minute or two
HASHED_SEEDS = (1, 7, 9, 14, 19)  # of all kinds of worlds


def assert_all_well(seeds: range) -> None:
    failed = [played for played in play_all(seeds) if played.violation is not None]
    assert not failed, "\n".join([*(f"seed {each.seed}: {each.violation}" for each in failed), failed[0].story])


@pytest.mark.timeout(1_800)  # a minute of one core
def test_faults_harm_no_request_and_leave_nothing() -> None:
    assert_all_well(SEEDS)


@pytest.mark.timeout(60)
def test_a_router_that_is_killed_while_it_starts_holds_up_nobody() -> None:
    """There is such a one in this world."""
    assert_all_well(range(1_036, 1_037))


@pytest.mark.timeout(60)
def test_a_choice_in_line_does_not_end_its_answer_when_the_only_worker_is_lost() -> None:
    """The other choice has begun in this world."""
    assert_all_well(range(1_841, 1_842))


def test_a_seed_that_does_not_end_fails_with_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    def tick(self: SourceBook, now_s: float) -> None:
        while True:
            pass

    monkeypatch.setattr(SourceBook, "tick", tick)
    played = play(0, longest_s=0.3)
    assert played.violation == "it has not ended after 0.3 s of computing"
    assert f"VIOLATION: {played.violation}" in played.story
    assert "in tick" in played.story  # where it was


def test_a_simulation_that_breaks_fails_with_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    async def strike(self: SimulatedCluster, trouble: Trouble) -> None:
        raise LookupError(str(trouble))

    monkeypatch.setattr(SimulatedCluster, "strike", strike)
    played = play(7)
    assert played.violation is not None
    assert played.violation.startswith("the simulation itself broke: LookupError: ")
    assert f"VIOLATION: {played.violation}" in played.story


@pytest.mark.parametrize("fails_before", [False, True])
def test_a_simulation_that_breaks_at_its_end_fails_with_its_story(
    monkeypatch: pytest.MonkeyPatch, fails_before: bool
) -> None:
    """What went wrong before is told then, if anything did."""
    whole = World.end

    async def end(self: World) -> None:
        await whole(self)
        raise LookupError("at its end")

    async def strike(self: SimulatedCluster, trouble: Trouble) -> None:
        raise LookupError("before")

    monkeypatch.setattr(World, "end", end)
    if fails_before:
        monkeypatch.setattr(SimulatedCluster, "strike", strike)
    played = play(7)
    assert played.violation == f"the simulation itself broke: LookupError: {'before' if fails_before else 'at its end'}"
    assert f"VIOLATION: {played.violation}" in played.story
    assert "in end" in played.story or fails_before  # where it was


def test_pins_that_others_have_followed_are_checked() -> None:
    """As many as before, of other blocks."""
    book = SimpleNamespace(_live={})
    pool = SimpleNamespace(has_changed=False, is_held=lambda block: block != 2)
    around: Any = SimpleNamespace(engine=SimpleNamespace(pool=pool))
    worker = object.__new__(SimulatedWorker)
    worker.around, worker._pinned = around, ()
    worker.worker = cast(Any, SimpleNamespace(_source=SimpleNamespace(_book=book)))
    book._live["a"] = SimpleNamespace(key="a", block_ids=[1])
    worker.check_books()
    book._live = {"b": SimpleNamespace(key="b", block_ids=[2])}
    with pytest.raises(AssertionError, match="b: blocks are let go of"):
        worker.check_books()


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    "seeds", [MANY_SEEDS[first : first + SEEDS_A_PART] for first in range(0, len(MANY_SEEDS), SEEDS_A_PART)],
    ids=lambda seeds: f"part-{seeds.start}..{seeds.stop}",
)
def test_many_more_faults_harm_no_request_and_leave_nothing(seeds: range) -> None:
    assert_all_well(seeds)


def test_a_seed_is_played_alike_whatever_python_hashes() -> None:
    program = f"from pd_ops.simulation.run import play\nfor seed in {HASHED_SEEDS}: print(play(seed).digest)"
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": other}, check=True,
        capture_output=True, text=True,
    )
    assert done.stdout.split() == [play(seed).digest for seed in HASHED_SEEDS]
