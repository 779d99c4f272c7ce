"""`pd-relay simulate faults`, as a user runs it."""

from __future__ import annotations

import pytest

from pd_engine.errors import InvalidArgument
from pd_ops.commands.simulate_faults import parse_seeds
from support.commands import run_command


def test_seeds_are_played_and_counted() -> None:
    document = run_command("simulate", "faults", "--seeds", "4..6", "--json").document
    assert (document["seeds"], document["failed"]) == (2, [])
    assert document["requests"] > 0
    assert document["virtual_seconds"] > 1


def test_one_seed_tells_its_story() -> None:
    finished = run_command("simulate", "faults", "--seed", "18", "--story")
    assert finished.code == 0, finished.stderr
    assert "prefill-1 is killed for" in finished.stdout
    assert "prefill-1#2  starts" in finished.stdout
    assert finished.stdout.splitlines()[-1].endswith("0 failed")


@pytest.mark.parametrize("text", ["", "5", "5..5", "6..5", "-1..5", "1..x", "1...2"])
def test_ranges_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--seeds must be A\.\.B"):
        parse_seeds(text)


def test_a_story_is_of_one_seed() -> None:
    finished = run_command("simulate", "faults", "--story")
    assert finished.code == 2
    assert "--seed" in finished.stderr
