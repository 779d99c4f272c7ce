"""Published trace formats: Mooncake's JSON lines and Azure's CSV. Plain, or compressed with gzip (.gz)."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pd_engine.errors import InvalidArgument, NotFound
from pd_ops.bench.serve.servegen import read_servegen
from pd_ops.bench.serve.traced import TracedRequest

MOONCAKE_BLOCK = 512
MAX_TOKENS = 1 << 24
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BEGIN = datetime(2000, 1, 1)  # before all of Azure's requests, which need not be in order
FORMATS = ("mooncake", "azure", "servegen")


def read_trace(path: Path, format_: str | None = None, *, most: int | None = None, skip: int = 0, seed: int = 0
               ) -> list[TracedRequest]:
    """The requests of a trace in order of arrival.

    Args:
        format_: one of FORMATS; None: as the file looks.
        most: requests at most, after the first `skip` ones.
        seed: of ServeGen's, which has statistics in place of requests.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is broken, and where; or it holds no request.
    """
    if not path.exists():
        raise NotFound(f"no trace {path}")
    kind = format_ or guess_format(path)
    if kind == "servegen":
        requests = read_servegen(path, most=None if most is None else skip + most, seed=seed)
    else:
        reader = {"mooncake": _mooncake, "azure": _azure}[kind]
        requests = _parsed(path, kind, reader, None if most is None else skip + most)
    chosen = sorted(requests, key=lambda request: request.arrival_s)[skip:]
    if not chosen:
        raise InvalidArgument(f"{path} holds no request" + (f" after the first {skip}" if skip else ""))
    first = chosen[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first) for request in chosen]


def guess_format(path: Path) -> str:
    """Raises:
    InvalidArgument: it looks like none of them.
    """
    if path.is_dir() or path.name.endswith((".tar", ".tar.xz", ".tar.gz", ".tgz")):
        return "servegen"
    first = next((line for line in _lines(path) if line.strip()), "")
    if first.lstrip().startswith("{"):
        return "mooncake"
    if first.split(",")[0].strip() == AZURE_COLUMNS[0]:
        return "azure"
    raise InvalidArgument(f"{path} is no trace in the format of {', '.join(FORMATS)}: it begins with {first[:60]!r}")


def _parsed(path: Path, kind: str, reader: Callable[[Iterator[str]], Iterator[TracedRequest]], most: int | None
            ) -> list[TracedRequest]:
    requests: list[TracedRequest] = []
    try:
        for request in reader(_lines(path)):
            requests.append(_checked(request))
            if len(requests) == most:
                break
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error, RecursionError) as error:
        raise InvalidArgument(
            f"{path} is no trace in the format of {kind}: request {len(requests) + 1}: {type(error).__name__}: {error}"
        ) from None
    return requests


def _checked(request: TracedRequest) -> TracedRequest:
    """Raises:
    ValueError: a length or time that no request has.
    """
    for name, value in (("prompt", request.prompt_tokens), ("output", request.output_tokens)):
        if not 0 <= value <= MAX_TOKENS:
            raise ValueError(f"{name} of {value} tokens")
    if not 0 <= request.arrival_s < 1e10:
        raise ValueError(f"arrival at {request.arrival_s} s")
    return request


def _mooncake(lines: Iterator[str]) -> Iterator[TracedRequest]:
    """{"timestamp" (ms), "input_length", "output_length", "hash_ids" of blocks of 512, each for its whole prefix}"""
    for line in lines:
        if not line.strip():
            continue
        fields = json.loads(line)
        prompt, ids = _whole(fields["input_length"]), tuple(_whole(one) for one in fields["hash_ids"])
        if len(ids) != -(-prompt // MOONCAKE_BLOCK):
            raise ValueError(f"{len(ids)} hash_ids for {prompt} tokens")
        yield TracedRequest(
            arrival_s=float(fields["timestamp"]) / 1000, prompt_tokens=prompt,
            output_tokens=_whole(fields["output_length"]), prefix=ids, block_tokens=MOONCAKE_BLOCK,
        )


def _azure(lines: Iterator[str]) -> Iterator[TracedRequest]:
    """TIMESTAMP,ContextTokens,GeneratedTokens. Seven digits of a second, of which Python reads six."""
    rows = csv.reader(lines)
    header = [name.strip() for name in next(rows, [])]
    if header != list(AZURE_COLUMNS):
        raise ValueError(f"columns {header}, not {list(AZURE_COLUMNS)}")
    for row in rows:
        if not row:
            continue
        time, prompt, output = row
        at = datetime.fromisoformat(_six_digits(time.strip()))
        if at.tzinfo is not None:
            at = at.astimezone(UTC).replace(tzinfo=None)
        yield TracedRequest(
            arrival_s=(at - BEGIN).total_seconds(), prompt_tokens=int(prompt), output_tokens=int(output)
        )


def _six_digits(time: str) -> str:
    whole, dot, rest = time.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{whole}{dot}{digits[:6]}{rest[len(digits):]}" if dot else time


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _lines(path: Path) -> Iterator[str]:
    """Raises:
    InvalidArgument: it cannot be read, is no gzip file, or no text.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            yield from file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {type(error).__name__}: {error}") from None
