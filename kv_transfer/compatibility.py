"""Whether two workers may hand over at all: decided when they first speak, with both values named."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum

from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import FailedPrecondition


def check_compatible(
    *, source: str, source_fingerprint: str, source_layout: CacheLayout, source_checksums: bool, destination: str,
    destination_fingerprint: str, destination_layout: CacheLayout, destination_checksums: bool,
) -> None:
    """`source` and `destination` are the workers' ids.

    Raises:
        FailedPrecondition: the first thing in which they differ, most telling first.
    """
    differences = [
        *_layout_differences(source_layout, destination_layout),
        ("fingerprint", source_fingerprint, destination_fingerprint),
        ("checksums", source_checksums, destination_checksums),
    ]
    for what, at_source, at_destination in differences:
        if at_source != at_destination:
            raise FailedPrecondition(
                f"workers cannot hand over: {what} is {_show(at_source)} at {source} (source) and "
                f"{_show(at_destination)} at {destination} (destination)"
            )


def _layout_differences(source: CacheLayout, destination: CacheLayout) -> list[tuple[str, object, object]]:
    names = ([c.name for c in source.components], [c.name for c in destination.components])
    differences: list[tuple[str, object, object]] = [
        ("layout version", source.version, destination.version),
        ("block_size", source.block_size, destination.block_size),
        ("number of components", len(names[0]), len(names[1])),
        ("component names", ", ".join(names[0]), ", ".join(names[1])),
    ]
    for ours, theirs in zip(source.components, destination.components, strict=False):
        differences += [
            (f"{field.name} of component {ours.name}", getattr(ours, field.name), getattr(theirs, field.name))
            for field in fields(ours)
        ]
    return differences


def _show(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
