"""One SVG of a run: tokens a second and open requests, each request's time to its first token, times between tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from pd_ops.bench.serve.record import Outcome, Record
from pd_ops.bench.serve.summary import Targets
from pd_ops.output import Document

WIDTH, PANEL, MARGIN, GAP = 900, 200, 60, 50
GOOD, LATE, BAD, LINE, SECOND = "#2a7", "#e90", "#c22", "#247", "#999"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """A panel whose lower left corner is (0, 0) and upper right one (right, top)."""

    y: int
    right: float
    top: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (MARGIN + (WIDTH - 2 * MARGIN) * min(1.0, x / self.right),
                self.y + PANEL - PANEL * min(1.0, y / self.top))

    def frame(self, title: str, unit: str) -> str:
        left, bottom = self.at(0, 0)
        right, top = self.at(self.right, self.top)
        return (
            f'<path d="M{left:.1f},{top:.1f}V{bottom:.1f}H{right:.1f}" fill="none" stroke="#333"/>'
            f'<text x="{left:.1f}" y="{top - 8:.1f}">{escape(title)}</text>'
            f'<text x="{left - 5:.1f}" y="{top + 10:.1f}" text-anchor="end">{self.top:.3g}</text>'
            f'<text x="{left - 5:.1f}" y="{bottom:.1f}" text-anchor="end">0</text>'
            f'<text x="{right:.1f}" y="{bottom + 15:.1f}" text-anchor="end">{self.right:.3g} {unit}</text>'
        )

    def line(self, points: Iterable[tuple[float, float]], color: str) -> str:
        path = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'

    def dot(self, x: float, y: float, color: str) -> str:
        left, top = self.at(x, y)
        return f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{color}" fill-opacity="0.7"/>'

    def level(self, y: float, color: str) -> str:
        (left, height), (right, _) = self.at(0, y), self.at(self.right, y)
        return f'<path d="M{left:.1f},{height:.1f}H{right:.1f}" stroke="{color}" stroke-dasharray="4 3"/>'


def plot(records: Sequence[Record], rows: Sequence[Document], targets: Targets, title: str) -> str:
    """The whole file."""
    span = float(max(1, len(rows)))
    panels = [_throughput(rows, span), _first_tokens(records, targets, span), _between(records, targets)]
    height = 40 + len(panels) * (PANEL + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="#fff"/><text x="{MARGIN}" y="18" font-size="13">'
        f'{escape(title)}</text>{"".join(panels)}</svg>\n'
    )


def _top(panel: int) -> int:
    return 50 + panel * (PANEL + GAP)


def _throughput(rows: Sequence[Document], span: float) -> str:
    tokens = max((row["tokens"] for row in rows), default=0) or 1
    running = max((row["running"] for row in rows), default=0) or 1
    axes = Axes(y=_top(0), right=span, top=float(tokens))
    return axes.frame(f"tokens a second (blue), open requests (grey, up to {running})", "s") + axes.line(
        ((row["second"], row["running"] * tokens / running) for row in rows), SECOND
    ) + axes.line(((row["second"], row["tokens"]) for row in rows), LINE)


def _first_tokens(records: Sequence[Record], targets: Targets, span: float) -> str:
    known = [(one, one.timing.ttft_ms) for one in records if one.timing.ttft_ms is not None]
    most = max((ttft for _, ttft in known if ttft is not None), default=1.0)
    axes = Axes(y=_top(1), right=span, top=max(most, targets.ttft_ms or 0.0, 1e-3))
    dots = [axes.dot(one.intended_s, ttft, GOOD if targets.are_met(one) else LATE)
            for one, ttft in known if ttft is not None]
    dots += [axes.dot(one.intended_s, axes.top, BAD) for one in records
             if one.outcome in (Outcome.REFUSED, Outcome.FAILED)]
    level = axes.level(targets.ttft_ms, BAD) if targets.ttft_ms is not None else ""
    title = "ms to the first token, by arrival: good (green), late (orange), refused or failed (red, at the top)"
    return axes.frame(title, "s") + "".join(dots) + level


def _between(records: Sequence[Record], targets: Targets) -> str:
    samples = sorted(itl for one in records for itl in one.timing.itl_ms)
    most = samples[min(len(samples) - 1, int(0.999 * len(samples)))] if samples else 1.0
    axes = Axes(y=_top(2), right=max(most, 1e-3), top=1.0)
    step = max(1, len(samples) // 500)
    points = [(samples[index], (index + 1) / len(samples)) for index in range(0, len(samples), step)]
    return axes.frame("share of times between tokens that are shorter", "ms") + axes.line(points, LINE)
