"""What each kernel must do at least on an H200, and which share of that was reached; written by roofline.sh."""

from __future__ import annotations

import json
from pathlib import Path

import pd_ops
from pd_engine.errors import FailedPrecondition, NotFound
from pd_ops.bench.measured_process import Document
from pd_ops.tables import table

ROOFLINE = Path(pd_ops.__file__).resolve().parents[2] / "docs" / "kernels" / "roofline.json"
HEADINGS = ("op", "call", "dtype", "GFLOP", "MB", "bound by", "floor µs", "measured µs", "share of the floor")


def read_roofline(path: Path = ROOFLINE) -> Document:
    """`measured_on` (identity of the GPU's measurement, or None) and `rows`, one a call.

    Raises:
        NotFound: there is no such file: it comes with a checkout, not with an installed package.
        FailedPrecondition: it is not what `kernels/benchmarks/roofline.sh --write` writes.
    """
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        roofline_text(document)
    except OSError:
        raise NotFound(f"no roofline: {path} is in a checkout only") from None
    except (ValueError, KeyError, TypeError) as error:
        raise FailedPrecondition(f"{path} holds no roofline: {error}") from None
    return document


def roofline_text(document: Document) -> str:
    rows = [
        (row["op"], row["call"], row["dtype"], f"{row['flops'] / 1e9:,.2f}", f"{row['bytes'] / 1e6:,.2f}",
         row["bound_by"], f"{row['floor_us']:,.2f}",
         "not measured" if row["measured_us"] is None else f"{row['measured_us']:,.2f}",
         "–" if row["share"] is None else f"{row['share']:.0%}")
        for row in document["rows"]
    ]
    return table(HEADINGS, rows)
