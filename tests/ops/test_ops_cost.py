"""What tokens cost: pools told apart, instances not taken for devices, two results side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.cost import Cost, Devices, Price, cost_of, devices_of
from pd_ops.bench.serve.result import Result
from support.commands import run_command
from support.serve_results import example, write_example

HOUR = Price(per_device_hour=2.0)


def result(topology: Any = None, **summary: Any) -> Result:
    """An hour's measurement: 1,000,000 prompt tokens and 100,000 answered ones."""
    made = example()
    counts = {
        "span_s": 3600.0, "prompt_tokens": 1_000_000, "completion_tokens": 100_000, "good": 500,
        "good_prompt_tokens": 500_000, "good_completion_tokens": 50_000,
    }
    document = made.document | {
        "summary": made.summary | counts | summary,
        "identity": made.identity | {"topology": {"prefill": 1, "decode": 3} if topology is None else topology},
    }
    return replace(made, document=document)


def test_each_pool_pays_for_its_tokens() -> None:
    cost = cost_of(result(), HOUR, Devices(prefill=1, decode=3))
    assert (cost.device_hours, cost.money) == (4.0, 8.0)
    assert cost.per_million_input == pytest.approx(2.0)
    assert cost.per_million_output == pytest.approx(60.0)
    assert cost.per_million_tokens == pytest.approx(8.0 / 1.1)
    assert cost.per_million_good_tokens == pytest.approx(8.0 / 0.55)
    assert cost.per_thousand_good_requests == pytest.approx(16.0)
    assert cost.instance_hours is None


def test_what_both_pools_cost_is_what_was_paid() -> None:
    for price in (HOUR, Price(per_device_hour=2.0, devices_per_instance=8)):
        cost = cost_of(result(), price, Devices(prefill=1, decode=3))
        assert cost.per_million_input is not None
        assert cost.per_million_output is not None
        assert cost.per_million_input * 1.0 + cost.per_million_output * 0.1 == pytest.approx(cost.money)


def test_an_instance_is_not_a_device() -> None:
    price = Price.parse(device_hour=None, instance_hour=16.0, devices_per_instance=8)
    assert price.per_device_hour == 2.0
    cost = cost_of(result(), price, Devices(prefill=1, decode=3))
    assert (cost.device_hours, cost.instance_hours, cost.money) == (4.0, 1.0, 16.0)  # four of its eight serve nothing
    full = cost_of(result(), price, Devices(prefill=4, decode=4))
    assert (full.device_hours, full.instance_hours, full.money) == (8.0, 1.0, 16.0)
    over = cost_of(result(), price, Devices(prefill=4, decode=5))
    assert (over.device_hours, over.instance_hours, over.money) == (9.0, 2.0, 32.0)


@pytest.mark.parametrize(("device", "instance", "size", "said"), [
    (None, None, None, "one price"), (1.0, 2.0, 8, "one price"), (None, 2.0, None, "not a device"),
    (1.0, None, 8, "belongs to --instance-hour"),
])
def test_prices_that_are_unclear(device: float | None, instance: float | None, size: int | None, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Price.parse(device_hour=device, instance_hour=instance, devices_per_instance=size)


def test_workers_that_do_both_have_no_price_a_kind() -> None:
    cost = cost_of(result(), HOUR, Devices(shared=2))
    assert (cost.per_million_input, cost.per_million_output) == (None, None)
    assert cost.money == 4.0


def test_nothing_served_has_no_price_a_token() -> None:
    cost: Cost = cost_of(
        result(prompt_tokens=0, completion_tokens=0, good=0, good_prompt_tokens=0, good_completion_tokens=0),
        HOUR, Devices(prefill=1, decode=1),
    )
    assert {cost.per_million_input, cost.per_million_output, cost.per_million_tokens, cost.per_million_good_tokens,
            cost.per_thousand_good_requests} == {None}
    assert cost.money == 4.0  # it was paid all the same


def test_devices_come_from_the_topology_or_are_told() -> None:
    assert devices_of(result(), prefill=None, decode=None, total=None) == Devices(prefill=1, decode=3)
    assert devices_of(result(), prefill=8, decode=None, total=None) == Devices(prefill=8, decode=3)
    assert devices_of(result(), prefill=None, decode=None, total=5) == Devices(shared=5)
    for topology in ({}, {"prefill": 1}, {"prefill": 0, "decode": 2}, {"prefill": "one", "decode": "two"}):
        with pytest.raises(InvalidArgument, match="--prefill-devices and --decode-devices"):
            devices_of(result(topology), prefill=None, decode=None, total=None)
    with pytest.raises(InvalidArgument, match="workers that do both"):
        devices_of(result(), prefill=1, decode=None, total=5)


def test_before_and_now(tmp_path: Path) -> None:
    before, now = write_example(tmp_path / "before"), write_example(tmp_path / "now", span_s=1.0)
    finished = run_command("cost", now, "--before", before, "--device-hour", "3.6", "--json")
    assert finished.code == 0, finished.stderr
    document = finished.document
    assert document["cost"]["money"] == pytest.approx(0.002)
    assert document["before"]["money"] == pytest.approx(0.004)
    assert document["same_work"]
    assert document["identity"]["weights_hash"] == document["before_identity"]["weights_hash"]
    text = run_command("cost", now, "--before", before, "--device-hour", "3.6").stdout
    assert text.count("weights 74469d44d404") == 2
    assert text.index("weights") < text.index("a million input tokens")
    assert run_command("cost", now).code == 2
