"""The files of a result: result.json, records.jsonl and plot.svg in one folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import InvalidArgument, NotFound
from pd_ops.bench.serve.about import text_of
from pd_ops.bench.serve.record import Outcome, Record, read_records, write_records
from pd_ops.bench.serve.summary import ItlOf, Targets
from pd_ops.output import Document

RESULT_FILE, RECORDS_FILE, PLOT_FILE = "result.json", "records.jsonl", "plot.svg"
MAX_RESULT_BYTES = 256 * 2**20
REQUIRED = ("identity", "load", "targets", "summary", "series")
NUMBERS = (  # of a summary, that are read again; a latency has none where nothing finished
    *((name,) for name in (
        "requests", "finished", "refused", "failed", "good", "good_share", "goodput_per_s", "span_s", "prompt_tokens",
        "completion_tokens", "good_prompt_tokens", "good_completion_tokens",
    )), *((name, rank) for name in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """`records`: empty if their file is not beside it."""

    path: Path
    document: Document
    records: tuple[Record, ...]

    @property
    def identity(self) -> Document:
        identity: Document = self.document["identity"]
        return identity

    @property
    def summary(self) -> Document:
        summary: Document = self.document["summary"]
        return summary

    @property
    def targets(self) -> Targets:
        found = self.document["targets"]
        return Targets(ttft_ms=found["ttft_ms"], itl_ms=found["itl_ms"], itl_of=ItlOf(found["itl_of"]))

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.outcome is Outcome.FINISHED]


def new_folder(path: Path) -> Path:
    """Made, if it is not there.

    Raises:
        InvalidArgument: it holds a result, or it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / RESULT_FILE).exists():
            raise InvalidArgument(f"{path} holds a result already; name another folder")
        (path / RECORDS_FILE).touch()
    except OSError as error:
        raise InvalidArgument(f"cannot write to {path}: {error.strerror}") from None
    return path


def write_result(path: Path, document: Document, records: tuple[Record, ...], plot: str) -> None:
    write_records(path / RECORDS_FILE, records)
    (path / PLOT_FILE).write_text(plot, encoding="utf-8")
    (path / RESULT_FILE).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_result(path: Path) -> Result:
    """Of a folder, or of its result.json.

    Raises:
        NotFound: there is none.
        InvalidArgument: it is broken, or has no identity.
    """
    file = path / RESULT_FILE if path.is_dir() else path
    if not file.is_file():
        raise NotFound(f"no result in {path}: `pd-relay bench serve --out FOLDER` writes one")
    try:
        document: Any = json.loads(read_bounded(file, MAX_RESULT_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from None
    missing = [name for name in REQUIRED if not isinstance(document, dict) or not document.get(name)]
    if missing:
        raise InvalidArgument(f"{file} is no result of bench serve: it has no {', '.join(missing)}")
    records = file.parent / RECORDS_FILE
    result = Result(path=file, document=document,
                    records=tuple(read_records(records)) if records.is_file() else ())
    try:
        _ = result.targets, text_of(result.identity)
        for keys in NUMBERS:
            _check_number(result.summary, keys)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"{file} is no result of bench serve: {type(error).__name__}: {error}") from None
    return result


def _check_number(summary: Document, keys: tuple[str, ...]) -> None:
    """Raises KeyError, TypeError or ValueError: there is none."""
    found: Any = summary
    for key in keys:
        found = found[key]
    is_latency = len(keys) > 1
    if not (found is None and is_latency) and (isinstance(found, bool) or not isinstance(found, int | float)
                                               or not 0 <= found < math.inf):
        raise ValueError(f"{'.'.join(keys)} is {str(found)[:40]}")
