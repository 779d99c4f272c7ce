"""The bench of the router runs, with real processes, and tells the doors apart."""

from __future__ import annotations

import psutil

from support.commands import run_command
from support.fork_server import start_fork_server


def test_doors_are_measured_and_nothing_is_left() -> None:
    start_fork_server()
    before = set(psutil.Process().children(recursive=True))
    result = run_command("bench", "router", "--json", "--seconds", "0.5", "--requests", "32", "--step-us", "20000")
    assert result.code == 0, result.stderr
    rows = result.document["rows"]
    assert [row["door"] for row in rows] == ["gRPC", "HTTP", "no router, gRPC"]
    for row in rows:
        assert row["requests_per_s"] > 0
        assert row["requests_per_cpu_s"] > 0
        assert row["tokens_per_cpu_s"] > 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert 0 < row["messages_per_token"] <= 1
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=20.0)[1] == []
