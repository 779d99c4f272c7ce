"""The two commands that prove the promise on a cluster of their own: `demo` and `verify`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.commands import run_anew, run_command

pytestmark = pytest.mark.cluster

TIMEOUT_S = 280.0


def test_demo(tmp_path: Path) -> None:
    finished = run_anew("demo", "--json", timeout_s=TIMEOUT_S, PD_RELAY_STATE_DIR=str(tmp_path))
    assert finished.code == 0, finished.stderr
    document = finished.document
    assert document["requests"] == document["identical"] == 15
    assert document["differences"] == []
    assert document["handoff_bytes"] == document["expected_handoff_bytes"] > 0
    assert 0 < document["accepted_tokens"] < document["drafted_tokens"]
    assert document["bytes_per_token"] == 5 * 576 * 2
    assert 0 < document["ttft"]["p50_ms"] <= document["ttft"]["p99_ms"]
    assert 0 < document["itl"]["p50_ms"] <= document["itl"]["p99_ms"]
    assert document["total_rss_bytes"] <= 2_500_000_000


def test_verify_another_model_on_two_by_two_workers(tmp_path: Path) -> None:
    """A random model in fp32, whose answers hang on every bit: two draft tokens, four pairs of workers."""
    model = tmp_path / "model"
    made = run_command("random-model", model, "--dtype", "fp32", "--seed", "5")
    assert made.code == 0, made.stderr
    finished = run_anew(
        "verify", "--model", model, "--prefill", "2", "--decode", "2", "--speculate", "2", "--count", "8",
        timeout_s=TIMEOUT_S, PD_RELAY_STATE_DIR=str(tmp_path),
    )
    assert finished.code == 0, finished.stderr
    found = re.fullmatch(r"identical to monolithic: (\d+) of \1", finished.stdout.splitlines()[-1])
    assert found is not None, finished.stdout
    assert int(found[1]) > 12, "cold and warm ones, resumed ones, every split, and more than there is room for"
