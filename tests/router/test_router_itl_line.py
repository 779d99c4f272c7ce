"""The time between tokens as a line over the batch."""

from __future__ import annotations

import random

import pytest

from pd_router.itl_line import FIXED_STEP_SEQUENCES, ItlLine


def test_one_report_is_taken_as_it_is_with_an_assumed_slope() -> None:
    line = ItlLine()
    assert not line.is_measured
    line.note(4, 10.0)
    assert line.is_measured
    assert line.at(4) == 10.0
    assert line.at(8) == pytest.approx(10.0 * (FIXED_STEP_SEQUENCES + 8) / (FIXED_STEP_SEQUENCES + 4))


@pytest.mark.parametrize(("fixed_ms", "slope_ms"), [(8.0, 3.0), (20.0, 0.0), (0.0, 2.0)])
def test_batches_that_differ_show_the_slope(fixed_ms: float, slope_ms: float) -> None:
    rng, line = random.Random(3), ItlLine()
    for _ in range(200):
        batch = rng.randrange(1, 30)
        line.note(batch, (fixed_ms + slope_ms * batch) * rng.uniform(0.97, 1.03))
    for batch in (1, 10, 30):
        assert line.at(batch) == pytest.approx(fixed_ms + slope_ms * batch, rel=0.1, abs=1.5)


def test_a_worker_that_has_become_slower_is_believed() -> None:
    line = ItlLine()
    for _ in range(100):
        line.note(8, 10.0)
    for _ in range(60):
        line.note(8, 30.0)
    assert line.at(8) == pytest.approx(30.0, rel=0.1)


def test_more_sequences_are_never_faster_and_none_takes_less_than_no_time() -> None:
    line = ItlLine()
    for batch, itl_ms in ((2, 50.0), (20, 10.0), (2, 50.0), (20, 10.0)):
        line.note(batch, itl_ms)
    assert line.at(1) == line.at(40)
    for batch, itl_ms in ((1, 0.1), (30, 100.0)) * 20:
        line.note(batch, itl_ms)
    assert line.at(1) >= 0
