"""The simulation finds bugs: each kind is planted into a production class, and found within so many seeds."""

from __future__ import annotations

import pytest

from pd_ops.simulation.run import SIMULATION_BROKE, play_all
from support import planted_simulation_bugs as bugs


def seeds_until_found(plant: bugs.Plant, patch: pytest.MonkeyPatch, most: int) -> str:
    """What was found. Fails if nothing is in that many seeds."""
    plant(patch)
    last = play_all(range(most), lambda played: played.violation is None)[-1]
    assert last.violation is not None, f"{plant.__name__} was not found in {most} seeds"
    assert f"VIOLATION: {last.violation}" in last.story
    assert not last.violation.startswith(SIMULATION_BROKE), last.story
    return last.violation


@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", bugs.FOUND_SOON, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found_within_30_seeds(plant: bugs.Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds_until_found(plant, monkeypatch, 30)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("plant", bugs.FOUND_LATER, ids=lambda plant: plant.__name__)
def test_rarer_planted_bugs_are_found_within_150_seeds(plant: bugs.Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds_until_found(plant, monkeypatch, 150)
