"""What `make lab` says of its targets: each is reached, missed, or was not measured."""

from __future__ import annotations

from typing import Any

from support.lab_targets import TARGETS, target_lines

WELL = {"num_lost": 0, "num_wrong": 0, "num_leaked_blocks": 0, "detection_s": 0.08, "full_capacity_s": 9.0,
        "gap_p99_ms": 800.0}


def drill(name: str, **figures: Any) -> dict[str, Any]:
    return {"name": name, **WELL, **figures}


def verdicts(*drills: dict[str, Any]) -> list[str]:
    return [line.split("|")[-2].strip() for line in target_lines(drills)[4:-1]]


ALL = (drill("cut-host", detection_s=2.4), drill("kill-decode"), drill("kill-host", detection_s=2.3), drill("burst"))


def test_all_is_reached() -> None:
    assert verdicts(*ALL) == ["reached"] * len(TARGETS)


def test_what_is_missed_is_said_with_its_figure() -> None:
    lines = target_lines((*ALL[:3], drill("burst", num_lost=1), drill("kill-prefill", detection_s=0.3)))
    lost = "cut-host 0, kill-decode 0, kill-host 0, burst 1, kill-prefill 0"
    assert f"| lost, in every drill | 0 | {lost} | **missed** |" in lines
    assert "| a killed process is noticed | 0.1 s | kill-decode 0.08 s, kill-prefill 0.3 s | **missed** |" in lines
    assert "| a cut link is noticed | 2.5 s | cut-host 2.4 s | reached |" in lines


def test_what_was_not_seen_is_not_reached() -> None:
    assert verdicts(drill("cut-host", detection_s=None))[3:5] == ["**missed**", "not run"]
    assert verdicts(drill("burst", num_leaked_blocks=None))[:3] == ["reached", "reached", "**missed**"]
