"""`bench placement`: a small fleet, every figure, and what cannot be measured."""

from __future__ import annotations

import pytest

from pd_engine.errors import InvalidArgument
from pd_ops.bench.placements import measure_placements
from support.commands import run_command


def test_rows() -> None:
    finished = run_command(
        "bench", "placement", "--workers", "6", "--blocks", "100", "--prompt-blocks", "8", "--prompt-blocks", "16",
        "--rounds", "1", "--json",
    )
    assert finished.code == 0, finished.stderr
    rows = finished.document["rows"]
    assert [(row["num_workers"], row["num_blocks"], row["num_prompt_blocks"]) for row in rows] == [
        (6, 100, 8), (6, 100, 16)
    ]
    for row in rows:
        assert 100 < row["num_entries"] <= 200
        assert row["placements_per_s"] > 0
        assert min(row["look_up_us"], row["choose_us"], row["hash_us"]) > 0


@pytest.mark.parametrize(
    ("workers", "blocks", "message"),
    [(3, 100, "--workers must be at least 4"), (4, 7, r"--blocks must be at least --prompt-blocks \(8\), got 7")],
)
def test_what_is_too_small_is_refused(workers: int, blocks: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        measure_placements(num_workers=workers, num_blocks=blocks, num_prompt_blocks=8, rounds=1)
