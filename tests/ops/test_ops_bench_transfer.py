"""`bench transfer` with little to move: every transport, every row, and what is hidden behind prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.journey import JourneyKey
from kv_transfer.transports import BEST_FIRST
from pd_engine.model.random_checkpoint import write_random_checkpoint
from support.commands import run_command
from support.handoffs import LAYOUT, DestinationSide, SourceSide, closing_for, new_key, running
from support.leaks import until

MOVING_KEYS = {"transport", "case", "checksums", "gib_per_s", "reference_gib_per_s", "ratio"}
HANDOFF_KEYS = {"transport", "prompt_tokens", "hidden_share", "token1_gap_ms", "itl_ms"}


def test_moving_rows() -> None:
    finished = run_command(
        "bench", "transfer", "--rounds", "1", "--requests", "0", "--region-mib", "1", "--pieces", "16", "--json"
    )
    assert finished.code == 0, finished.stderr
    document = finished.document
    rows = document["rows"]
    assert [(row["transport"], row["case"], row["checksums"]) for row in rows] == [
        (transport, case, checksums)
        for case in ("region", "pieces") for transport in BEST_FIRST for checksums in (False, True)
    ]
    for row in rows:
        assert set(row) == MOVING_KEYS
        assert row["ratio"] == pytest.approx(row["gib_per_s"] / row["reference_gib_per_s"])
    assert document["handoffs"] == []
    assert document["commit"]


@pytest.mark.parametrize("transport", [
    pytest.param(name, marks=[pytest.mark.slow] if number else []) for number, name in enumerate(BEST_FIRST)
])
def test_handoff_rows(transport: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", {"num_hidden_layers": 2}, seed=5)
    finished = run_command(
        "bench", "transfer", "--transport", transport, "--rounds", "0", "--requests", "1", "--model",
        tmp_path / "model", "--prompt-tokens", "70", "--json",
    )
    assert finished.code == 0, finished.stderr
    [row] = finished.document["handoffs"]
    assert set(row) == HANDOFF_KEYS
    assert (row["transport"], row["prompt_tokens"]) == (transport, 70)
    assert 0 <= row["hidden_share"] <= 1
    assert row["itl_ms"] >= 0  # 0 where both tokens came in one message


def test_an_unknown_transport_is_refused() -> None:
    finished = run_command("bench", "transfer", "--transport", "carrier-pigeon", "--json")
    assert finished.code == 2
    assert "--transport must be shared_memory or tcp or nixl or nccl" in finished.document["error"]["message"]


async def test_what_was_verified_before_the_end_is_hidden() -> None:
    """All but one component is there when the closing part comes: those bytes are hidden, and no others."""
    num_tokens = 40
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        key = new_key()
        info = source.begin(key, num_tokens)
        destination.reserve_and_pull(key, num_tokens, info)
        *early, last = range(len(LAYOUT.components))
        for component in early:
            source.source.publish(key, component, num_tokens)
        expected = sum(LAYOUT.components[component].slot_bytes for component in early) * num_tokens
        await until(lambda: num_verified_bytes(destination, key) == expected)
        source.source.publish(key, last, num_tokens)
        source.source.finish(key, closing_for(num_tokens))
        result = await destination.result_of(key)
    assert result.num_bytes == LAYOUT.bytes_per_token * num_tokens
    assert expected <= result.num_hidden_bytes <= result.num_bytes


def num_verified_bytes(destination: DestinationSide, key: JourneyKey) -> int:
    lease = destination.destination._book.get(key)
    return lease.pieces.num_verified_bytes if lease is not None and lease.pieces is not None else 0
