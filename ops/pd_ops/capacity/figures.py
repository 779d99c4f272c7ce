"""Figures as they are printed: a raw number for programs, a text for people, and the formula."""

from __future__ import annotations

from dataclasses import dataclass

from pd_ops.output import Document


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str
    value: float
    shown: str
    source: str = ""

    def to_json(self) -> Document:
        return {"name": self.name, "value": self.value, "shown": self.shown, "source": self.source}


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """`key`: in the JSON document."""

    key: str
    title: str
    figures: tuple[Figure, ...]

    def text(self) -> str:
        names, values = (max(map(len, column)) for column in zip(*((one.name, one.shown) for one in self.figures),
                                                                 strict=True))
        return "\n".join([self.title, *(
            f"  {one.name:<{names}}  {one.shown:>{values}}  {one.source}".rstrip() for one in self.figures
        )])


def in_kib(name: str, num_bytes: float, source: str = "", *, decimals: int = 0) -> Figure:
    return Figure(name=name, value=num_bytes, shown=f"{num_bytes / 2**10:.{decimals}f} KiB", source=source)


def in_mib(name: str, num_bytes: float, source: str = "", *, decimals: int = 6) -> Figure:
    return Figure(name=name, value=num_bytes, shown=f"{num_bytes / 2**20:.{decimals}f} MiB", source=source)


def in_gib(name: str, num_bytes: float, source: str = "", *, decimals: int = 5) -> Figure:
    return Figure(name=name, value=num_bytes, shown=f"{num_bytes / 2**30:.{decimals}f} GiB", source=source)


def whole(name: str, num_bytes: int, source: str = "") -> Figure:
    """In the largest unit in which it is a whole number."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % size == 0:
            return Figure(name=name, value=num_bytes, shown=f"{num_bytes // size} {unit}", source=source)
    return Figure(name=name, value=num_bytes, shown=f"{num_bytes:,} B", source=source)


def in_bytes(name: str, num_bytes: float, source: str = "") -> Figure:
    return Figure(name=name, value=num_bytes, shown=f"{num_bytes:,.0f} B", source=source)


def in_ms(name: str, seconds: float, source: str = "") -> Figure:
    return Figure(name=name, value=seconds * 1e3, shown=f"{seconds * 1e3:,.3f} ms", source=source)


def count(name: str, value: float, source: str = "", *, decimals: int = 0, of: str = "") -> Figure:
    return Figure(name=name, value=value, shown=f"{value:,.{decimals}f}{of}", source=source)
