"""`bench placement`: a small fleet, every figure, a small trace, and what cannot be measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pd_engine.errors import InvalidArgument, NotFound
from pd_ops.bench.placement_replay import Policy, replay
from pd_ops.bench.placement_trace import TracedRequest, read_trace
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


def trace_of_conversations(num_conversations: int, num_turns: int) -> list[TracedRequest]:
    """Each turn repeats what was said and adds a block of 512 tokens; a second between requests."""
    hashes = {
        talk: [bytes([talk, turn]) * 8 for turn in range(num_turns)] for talk in range(num_conversations)
    }
    turns = [(turn, talk) for turn in range(num_turns) for talk in range(num_conversations)]
    return [
        TracedRequest(float(at), 512 * (turn + 1), tuple(hashes[talk][: turn + 1]))
        for at, (turn, talk) in enumerate(turns)
    ]


def test_a_replay_counts_what_was_cached_and_how_long_it_took() -> None:
    trace = trace_of_conversations(num_conversations=3, num_turns=4)
    row = replay(trace, Policy.COSTS, num_workers=2, tokens_per_s=512.0, cache_blocks=100)
    assert row.num_requests == 12
    assert row.cached_share == pytest.approx(3 * (0 + 1 + 2 + 3) / (3 * (1 + 2 + 3 + 4)))  # all that can be
    assert (row.ttft_mean_s, row.ttft_p99_s) == pytest.approx((1.0, 1.0))  # each computes its new block only
    forgetful = replay(trace, Policy.COSTS, num_workers=2, tokens_per_s=512.0, cache_blocks=1)
    assert forgetful.cached_share < row.cached_share
    in_turns = replay(trace, Policy.TURNS, num_workers=2, tokens_per_s=512.0, cache_blocks=100)
    assert in_turns.cached_share < row.cached_share


def test_a_trace_is_read_and_replayed_by_the_command(tmp_path: Path) -> None:
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": 1100, "output_length": 9, "hash_ids": [7, 8, 9 + i]})
        for i in range(4)
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert [len(request.block_hashes) for request in read_trace(path, most=3)] == [2, 2, 2]
    finished = run_command("bench", "placement", "--trace", path, "--trace-workers", "2", "--json")
    assert finished.code == 0, finished.stderr
    assert [row["policy"] for row in finished.document["replays"]] == [policy.value for policy in Policy]
    assert finished.document["rows"] == []


@pytest.mark.parametrize(
    "text", ["", "not json", '{"timestamp": 1}', '{"timestamp": NaN, "input_length": 1, "hash_ids": [1]}', "[" * 99_999]
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl (is no trace in the format of mooncake|holds no request)"):
        read_trace(path)
    with pytest.raises(NotFound, match="no trace"):
        read_trace(tmp_path / "absent")
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(b"{}\n" * 1000)[:-20])
    with pytest.raises(InvalidArgument, match=r"cannot be read|format of mooncake"):
        read_trace(packed)
