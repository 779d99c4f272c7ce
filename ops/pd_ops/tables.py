"""Plain tables, and numbers with units, for people."""

from __future__ import annotations

from collections.abc import Sequence

SI_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell, under their names. A column of numbers stands right, any other left."""
    cells = [[str(cell) for cell in row] for row in rows]
    padded = [
        _padded(name, values) for name, *values in zip(columns, *cells, strict=True)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def si(number: int) -> str:
    """1234567 as "1.23 M"; 0 as "-"."""
    for factor, prefix in SI_PREFIXES:
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return str(number) if number else "-"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _padded(name: str, values: Sequence[str]) -> list[str]:
    width = max(map(len, (name, *values)))
    is_number = all(value[:1].isdigit() or value in ("-", "") for value in values)
    return [text.rjust(width) if is_number else text.ljust(width) for text in (name, *values)]
