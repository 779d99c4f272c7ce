"""Plain tables, and numbers with units, for people."""

from __future__ import annotations

from collections.abc import Sequence

SI_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; numbers and what begins with a digit stand right, the rest left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    lines = [[column.ljust(width) for column, width in zip(columns, widths, strict=True)]]
    lines += [[_aligned(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)


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


def _aligned(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
