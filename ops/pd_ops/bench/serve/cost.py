"""What tokens cost: from a result of bench serve and the price of a device hour. Pure.

A device hour is one device for one hour. An instance holds several devices and is paid as a whole: devices of it that
serve nothing are paid too, and shared out over the pools. Hours of devices and of instances are never added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.result import Result
from pd_ops.output import Document

SECONDS_AN_HOUR = 3600.0
MILLION = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Of one device for one hour.

    Attributes:
        devices_per_instance: None: priced by the device.
    """

    per_device_hour: float
    devices_per_instance: int | None = None

    @classmethod
    def parse(
        cls, *, device_hour: float | None, instance_hour: float | None, devices_per_instance: int | None
    ) -> Price:
        """Raises:
        InvalidArgument: none or both prices, or an instance of unknown size.
        """
        if (device_hour is None) == (instance_hour is None):
            raise InvalidArgument("give one price: --device-hour, or --instance-hour with --devices-per-instance")
        if device_hour is not None:
            if devices_per_instance is not None:
                raise InvalidArgument("--devices-per-instance belongs to --instance-hour, not to --device-hour")
            return cls(per_device_hour=device_hour)
        if devices_per_instance is None:
            raise InvalidArgument("--instance-hour needs --devices-per-instance: an instance is not a device")
        assert instance_hour is not None
        return cls(per_device_hour=instance_hour / devices_per_instance, devices_per_instance=devices_per_instance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """How many each pool has; `shared`: of workers that do both, whose cost cannot be told apart."""

    prefill: int = 0
    decode: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.shared

    @property
    def is_split(self) -> bool:
        return self.prefill > 0 and self.decode > 0 and not self.shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Money in the price's currency. None: cannot be told, as no tokens were served, or devices do both.

    Attributes:
        device_hours: of devices that served. instance_hours: of whole instances; None if priced by the device.
        per_million_input: what the prefill pool cost for a million prompt tokens, cached ones included.
        per_million_output: what the decode pool cost for a million generated tokens.
        per_million_tokens: all devices, for a million tokens of either kind.
        per_million_good_tokens: the same, if only requests within the targets count.
    """

    span_s: float
    device_hours: float
    instance_hours: float | None
    money: float
    per_million_input: float | None
    per_million_output: float | None
    per_million_tokens: float | None
    per_million_good_tokens: float | None
    per_thousand_good_requests: float | None

    def to_json(self) -> Document:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def devices_of(result: Result, *, prefill: int | None, decode: int | None, total: int | None) -> Devices:
    """One device a worker, as the result's topology counts them, unless told otherwise.

    Args:
        total: devices of workers that do both.

    Raises:
        InvalidArgument: it is not known how many, or told twice.
    """
    if total is not None:
        if prefill is not None or decode is not None:
            raise InvalidArgument("give --devices for workers that do both, or --prefill-devices and --decode-devices")
        return Devices(shared=total)
    topology = result.identity.get("topology") or {}
    counts = [
        told if told is not None else topology.get(role) for told, role in ((prefill, "prefill"), (decode, "decode"))
    ]
    first, second = (count if isinstance(count, int) and not isinstance(count, bool) else None for count in counts)
    if not first or not second:
        raise InvalidArgument(
            f"{result.path} does not tell how many devices were used: give --prefill-devices and --decode-devices, or "
            "--devices"
        )
    return Devices(prefill=first, decode=second)


def cost_of(result: Result, price: Price, devices: Devices) -> Cost:
    summary = result.summary
    span_s = float(summary["span_s"])
    hours = span_s / SECONDS_AN_HOUR
    size = price.devices_per_instance
    instances = None if size is None else -(-devices.total // size)
    paid_devices = devices.total if instances is None or size is None else instances * size
    device_price = price.per_device_hour * paid_devices / devices.total  # of one that served
    money = hours * devices.total * device_price
    prompt, output = summary["prompt_tokens"], summary["completion_tokens"]
    good_tokens = summary["good_prompt_tokens"] + summary["good_completion_tokens"]

    def pool(count: int, tokens: int) -> float | None:
        return _per(hours * count * device_price, tokens, MILLION) if devices.is_split else None

    return Cost(
        span_s=span_s, device_hours=hours * devices.total, money=money,
        instance_hours=None if instances is None else hours * instances,
        per_million_input=pool(devices.prefill, prompt), per_million_output=pool(devices.decode, output),
        per_million_tokens=_per(money, prompt + output, MILLION),
        per_million_good_tokens=_per(money, good_tokens, MILLION),
        per_thousand_good_requests=_per(money, summary["good"], 1000.0),
    )


def _per(money: float, count: int, unit: float) -> float | None:
    return money / count * unit if count else None
