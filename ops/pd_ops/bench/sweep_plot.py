"""One SVG of a sweep: a line for each variant, with its goodput and p99 as bars; those of the front stand out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from pd_ops.bench.serve.plot import GOOD, MARGIN, SECOND, WIDTH
from pd_ops.output import Document

LINE_HEIGHT, TOP, NAMES = 22, 60, 220
COLUMNS = (("goodput, requests/s", ("goodput_per_s",)), ("TTFT p99, ms", ("ttft_ms", "p99")),
           ("ITL p99, ms", ("itl_ms", "p99")))


def plot(rows: Sequence[Document]) -> str:
    """The whole file; `rows` as `read_rows` gives them."""
    width = (WIDTH - MARGIN - NAMES) / len(COLUMNS)
    parts = [
        _text(MARGIN // 2, TOP + number * LINE_HEIGHT + 14, row["variant"], GOOD if row["front"] else "#333")
        for number, row in enumerate(rows)
    ]
    for column, (title, keys) in enumerate(COLUMNS):
        left = NAMES + MARGIN / 2 + column * width
        parts.append(_text(left, TOP - 8, title))
        values = [_value(row, keys) for row in rows]
        longest = max((value for value in values if value is not None), default=0.0) or 1.0
        for number, (row, value) in enumerate(zip(rows, values, strict=True)):
            y = TOP + number * LINE_HEIGHT
            if value is None:
                parts.append(_text(left, y + 14, "-"))
                continue
            length = (width - 70) * value / longest
            parts.append(f'<rect x="{left:.1f}" y="{y + 3}" width="{length:.1f}" height="{LINE_HEIGHT - 7}" '
                         f'fill="{GOOD if row["front"] else SECOND}"/>')
            parts.append(_text(left + length + 4, y + 14, f"{value:.3g}"))
    height = TOP + len(rows) * LINE_HEIGHT + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'{_text(MARGIN // 2, 20, "one setting at a time; green: none has fewer workers, more goodput and lower p99")}'
        f'{"".join(parts)}</svg>\n'
    )


def _value(row: Document, keys: Sequence[str]) -> float | None:
    found: Any = row
    for key in keys:
        found = found[key]
    return None if found is None else float(found)


def _text(x: float, y: float, words: str, color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}">{escape(words)}</text>'
