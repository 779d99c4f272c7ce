"""Costs of hardware that is not here: orders that must hold, and DeepSeek's published day within the stated error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_engine.errors import InvalidArgument
from pd_ops.capacity.named import architecture
from pd_ops.sizing.published_day import Day, compared
from pd_ops.sizing.roofline import (
    HARDWARE,
    Deployment,
    active_parameters,
    exchanged_bytes,
    resident_bytes,
    roofline,
    sizes,
)
from support.commands import run_command

H800 = Deployment(hardware=HARDWARE["h800"], prefill_devices=32, decode_devices=144)
V3 = architecture("deepseek-v3")


def test_what_one_token_takes_of_v3() -> None:
    """37 billion active parameters with the embedding (deepseek_v3.md), which is no product."""
    assert active_parameters(V3) == pytest.approx(36.6e9, rel=0.01)
    assert exchanged_bytes(V3) == 58 * 8 * (7168 + 4 * 56 + 2 * 7168)
    assert resident_bytes(V3, 1) > resident_bytes(V3, 32) > resident_bytes(V3, 256)


def test_more_of_anything_is_no_slower() -> None:
    base = roofline(V3, H800)
    for better in (replace(H800, hardware=HARDWARE["b200"]), replace(H800, decode_devices=256, prefill_devices=64)):
        costs = roofline(V3, better)
        assert costs.decode_s(1000, 1e6) < base.decode_s(1000, 1e6)
        assert costs.prefill_s([(0, 4096)]) < base.prefill_s([(0, 4096)])
    half = roofline(V3, replace(H800, efficiency=0.5))
    assert half.decode_ms_per_sequence == pytest.approx(2 * base.decode_ms_per_sequence)


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="does not fit 4 devices of h800"):
        roofline(V3, replace(H800, prefill_devices=4))


def test_weights_leave_room_for_a_cache_unless_its_size_is_given() -> None:
    command = ("simulate", "capacity", "--hardware", "h100", "--model", "deepseek-v3", "--decode-devices", "10",
               "--kind", "short", "--requests", "20", "--rate", "10", "--pools", "1:1")
    finished = run_command(*command)
    assert finished.code == 2
    assert "does not fit 10 devices of h100, of whose memory 90% are for weights and cache" in finished.stderr
    finished = run_command(*command, "--cache-tokens", "100000")
    assert finished.code == 0, finished.stderr


def test_experts_are_reached_over_nvlink_within_a_host_and_over_the_network_beyond() -> None:
    flops = 2 * active_parameters(V3) / 1979e12

    def exchange_s(devices: int, name: str) -> float:
        hardware = replace(HARDWARE[name], memory_gib=1000, fp8_tflops=1979)
        costs = roofline(V3, Deployment(hardware=hardware, prefill_devices=devices, decode_devices=devices))
        return costs.prefill_ms_per_token / 1e3 * devices - flops

    sent = exchanged_bytes(V3)
    for name, rate in (("h100", 450e9), ("h800", 200e9), ("h200", 450e9), ("b200", 900e9)):
        assert exchange_s(8, name) == pytest.approx(sent / rate)
        assert exchange_s(16, name) == pytest.approx(sent / 50e9)
        assert exchange_s(1, name) == pytest.approx(0.0, abs=1e-12)


def test_workers_are_as_large_as_their_devices() -> None:
    found = sizes(V3, H800)
    left = 0.9 * 80 * 2**30 - resident_bytes(V3, 144)
    assert found["cache_tokens"] == int(144 * left / 70_272)
    assert found["prefill_cache_tokens"] < found["cache_tokens"]
    assert (found["chunk_tokens"], found["max_batch"]) == (512 * 32, 128 * 144)


def test_what_is_no_latent_for_every_token_has_no_roofline() -> None:
    with pytest.raises(InvalidArgument, match="DeepSeek-V3's family"):
        roofline(architecture("deepseek-v4-pro"), H800)


def test_the_published_day_comes_out_within_a_quarter() -> None:
    rows = {row["name"]: row["ratio"] for row in compared(Day())}
    assert rows.pop("nodes, on average") == pytest.approx(1.0, abs=0.01)
    assert len(rows) == 3
    for name, ratio in rows.items():
        assert 0.75 < ratio < 1.25, (name, ratio)


def test_the_command_prints_it() -> None:
    finished = run_command("simulate", "published-day", "--json")
    assert finished.code == 0, finished.stderr
    assert len(finished.document["rows"]) == 4
    assert finished.document["commit"] or finished.document["commit"] is None  # its identity


def test_a_cluster_of_named_hardware_is_played() -> None:
    finished = run_command(
        "simulate", "capacity", "--hardware", "h800", "--prefill-devices", "32", "--decode-devices", "144", "--kind",
        "short", "--requests", "200", "--rate", "100", "--pools", "1:1", "--max-batch", "20000", "--json",
    )
    assert finished.code == 0, finished.stderr
    [row] = finished.document["rows"]
    assert row["finished"] == 200
    assert row["itl_ms"]["p50"] > 8  # the weights alone
