"""Twice what can be served in time, in simulated time: goodput stays, and nobody who was let in is late by much."""

from __future__ import annotations

import pytest

from pd_ops.bench.overload import overload

MARGIN = 1.1  # of a target, at speeds that change by a tenth
SECONDS = 50


@pytest.mark.parametrize(("prefill_tokens_per_s", "in_time_per_s"), [(10_000.0, 12.0), (4_000.0, 7.0)])
def test_goodput_stays_under_twice_the_load(prefill_tokens_per_s: float, in_time_per_s: float) -> None:
    """The first is short of decode workers, the second of prefill workers."""
    meets, more, twice = (
        overload(load_per_s, seconds=SECONDS, prefill_tokens_per_s=prefill_tokens_per_s)
        for load_per_s in (in_time_per_s, 1.3 * in_time_per_s, 2 * in_time_per_s)
    )
    assert meets.served_share > 0.99
    best_per_s = max(row.goodput_per_s for row in (meets, more, twice))
    assert twice.goodput_per_s >= 0.95 * best_per_s, (meets, more, twice)
    for row in (meets, more, twice):
        assert row.ttft_most <= MARGIN, row
        assert row.itl_most <= MARGIN, row
        assert row.served_share + row.refused_at_once_share + row.refused_in_line_share == pytest.approx(1.0)


def test_without_targets_nearly_everybody_is_late() -> None:
    row = overload(20.0, seconds=35, with_targets=False)
    assert row.served_share == 1.0
    assert row.goodput_per_s < 5
    assert row.itl_most > 1.3
