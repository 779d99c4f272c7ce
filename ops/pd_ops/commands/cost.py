"""`pd-relay cost`: what a million tokens cost, from a result of bench serve and a price."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_ops.bench.serve.about import text_of
from pd_ops.bench.serve.compare import differences, is_same_work
from pd_ops.bench.serve.cost import Cost, Price, cost_of, devices_of
from pd_ops.bench.serve.result import read_result
from pd_ops.commands import options
from pd_ops.output import Document
from pd_ops.tables import table

ROWS = (
    ("a million input tokens", "per_million_input"), ("a million output tokens", "per_million_output"),
    ("a million tokens of either kind", "per_million_tokens"),
    ("a million tokens of good requests", "per_million_good_tokens"),
    ("a thousand good requests", "per_thousand_good_requests"),
    ("the measurement", "money"), ("device hours", "device_hours"), ("instance hours", "instance_hours"),
)


def command(
    context: typer.Context,
    result: Annotated[Path, typer.Argument(help="A result's folder, or its result.json.")],
    before: Annotated[Path | None, typer.Option(help="An earlier result, to set beside it.")] = None,
    device_hour: Annotated[float | None, typer.Option(min=0, help="Price of one device for one hour.")] = None,
    instance_hour: Annotated[float | None, typer.Option(min=0, help="Price of one instance for one hour.")] = None,
    devices_per_instance: Annotated[int | None, typer.Option(min=1, help="Devices in such an instance.")] = None,
    prefill_devices: Annotated[
        int | None, typer.Option(min=1, help="Default: one a prefill worker of the result.")
    ] = None,
    decode_devices: Annotated[int | None, typer.Option(min=1, help="Default: one a decode worker of it.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Of workers that do both.")] = None,
    as_json: options.Json = False,
) -> None:
    """Print what tokens cost: input ones by the prefill pool's devices, output ones by the decode pool's. With
    --before, two results side by side; flags about devices hold for both."""
    output = options.start(context, as_json)
    price = Price.parse(
        device_hour=device_hour, instance_hour=instance_hour, devices_per_instance=devices_per_instance
    )
    found = read_result(result)
    earlier = read_result(before) if before is not None else None
    costs = [
        cost_of(one, price, devices_of(one, prefill=prefill_devices, decode=decode_devices, total=devices))
        for one in (earlier, found) if one is not None
    ]
    same_work = None if earlier is None else is_same_work(differences(earlier, found))
    document: Document = {
        "per_device_hour": price.per_device_hour, "same_work": same_work, "cost": costs[-1].to_json(),
        "before": costs[0].to_json() if earlier is not None else None,
        "identity": found.identity, "before_identity": None if earlier is None else earlier.identity,
    }
    output.document(document)
    output.text(text_of(found.identity) + "\n")
    if earlier is not None:
        output.text(f"before:\n{text_of(earlier.identity)}\n")
    output.text(_text(price, costs))
    if same_work is False:
        output.text("load or targets differ, so the two costs are of different work")


def _text(price: Price, costs: list[Cost]) -> str:
    size = price.devices_per_instance
    unit = f"{price.per_device_hour:g} a device hour"
    if size is not None:
        unit += f" (an instance of {size} devices: {price.per_device_hour * size:g} an hour)"
    names = ("cost", "") if len(costs) == 1 else ("cost", "before", "now", "now/before")
    rows = []
    for name, key in ROWS:
        values = [getattr(cost, key) for cost in costs]
        cells = [_number(value) for value in values]
        if len(values) == 2:
            cells.append(_number(values[1] / values[0] if values[0] and values[1] is not None else None))
        rows.append((name, *cells))
    return f"{unit}; in the price's currency\n{table(names, rows)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
