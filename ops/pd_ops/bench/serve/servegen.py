"""ServeGen's format: statistics of clients, from which requests are drawn.

A folder or an archive with, for each client K, `chunk-K-trace.csv` (window_start_s, rate_per_s, coefficient of
variation, distribution, two parameters) and `chunk-K-dataset.json` ({window start: {"input_tokens", "output_tokens":
"{tokens: probability}"}}). Gaps between a client's requests are drawn with the window's rate and variation; the two
parameters, which are fitted to gaps within bursts, are not used.
"""

from __future__ import annotations

import ast
import bisect
import csv
import heapq
import itertools
import json
import lzma
import random
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.arrivals import renewal
from pd_ops.bench.serve.traced import TracedRequest

MAX_FILE_BYTES = 64 * 2**20
_BROKEN = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, AttributeError, OverflowError, MemoryError,
           csv.Error)
_NAME = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Until the next one begins."""

    start_s: float
    end_s: float
    rate_per_s: float
    variation: float
    family: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """A distribution of token counts: values, and cumulated probabilities."""

    values: tuple[int, ...]
    cumulated: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        index = bisect.bisect_right(self.cumulated, rng.random() * self.cumulated[-1])
        return self.values[min(index, len(self.values) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """`lengths`: (window start, prompt, output) in order."""

    number: int
    windows: tuple[Window, ...]
    lengths: tuple[tuple[float, Lengths, Lengths], ...]

    def requests(self, rng: random.Random) -> Iterator[TracedRequest]:
        for window in self.windows:
            if window.rate_per_s <= 0 or not self.lengths:
                continue
            times = renewal(window.rate_per_s, window.variation, rng, family=window.family)
            for after in itertools.takewhile(lambda s, w=window: w.start_s + s < w.end_s, times):  # type: ignore[misc]
                at = window.start_s + after
                prompt, output = self._at(at)
                yield TracedRequest(arrival_s=at, prompt_tokens=prompt.draw(rng), output_tokens=output.draw(rng))

    def _at(self, time_s: float) -> tuple[Lengths, Lengths]:
        index = bisect.bisect_right([start for start, _, _ in self.lengths], time_s) - 1
        _, prompt, output = self.lengths[max(0, index)]
        return prompt, output


def read_servegen(path: Path, *, most: int | None, seed: int) -> list[TracedRequest]:
    """The first `most` requests of all clients together, in order of arrival.

    Raises:
        InvalidArgument: the files cannot be read, or hold something else.
    """
    clients = read_clients(path)
    drawn = heapq.merge(
        *(client.requests(random.Random(f"{seed}/{client.number}")) for client in clients),
        key=lambda request: request.arrival_s,
    )
    return list(itertools.islice(drawn, most))


def read_clients(path: Path) -> list[Client]:
    found: dict[int, dict[str, tuple[str, str]]] = {}
    for name, text in _files(path):
        if match := _NAME.search(name):
            found.setdefault(int(match[1]), {})[match[2]] = (name, text)
    clients = []
    for number, parts in sorted(found.items()):
        if len(parts) != 2:
            raise InvalidArgument(f"{path}: client {number} has only {next(iter(parts.values()))[0]}")
        name, text = parts["trace.csv"]
        with _explained(path, name):
            windows = _windows(text)
        name, text = parts["dataset.json"]
        with _explained(path, name):
            lengths = _lengths(text)
        clients.append(Client(number=number, windows=windows, lengths=lengths))
    if not clients:
        raise InvalidArgument(f"{path} is no trace in the format of servegen: there is no chunk-N-trace.csv in it")
    return clients


class _explained:  # noqa: N801 - reads as a statement
    def __init__(self, path: Path, name: str) -> None:
        self._where = f"{path}: {name}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _BROKEN):
            raise InvalidArgument(f"{self._where} is broken: {type(error).__name__}: {error}") from None


def _windows(text: str) -> tuple[Window, ...]:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    starts = [float(row[0]) for row in rows]
    if not all(0 <= start < 1e9 for start in starts):
        raise ValueError("a window begins at no time")
    if starts != sorted(starts):
        raise ValueError("windows are not in order")
    length = starts[1] - starts[0] if len(starts) > 1 else 600.0
    windows = []
    for row, start, end in zip(rows, starts, [*starts[1:], (starts[-1] if starts else 0) + length], strict=True):
        if len(row) < 4:
            raise ValueError(f"window {row[0]} has {len(row)} columns")
        rate, variation = float(row[1]), float(row[2])
        if not (0 <= rate < 1e6 and 0 <= variation < 1e4):
            raise ValueError(f"window {row[0]} has rate {rate} and variation {variation}")
        windows.append(Window(start_s=start, end_s=end, rate_per_s=rate, variation=variation,
                              family="weibull" if row[3].strip().lower() == "weibull" else "gamma"))
    return tuple(windows)


def _lengths(text: str) -> tuple[tuple[float, Lengths, Lengths], ...]:
    parts = json.loads(text)
    found = []
    for start, fields in parts.items():
        prompt, output = (_distribution(fields[name]) for name in ("input_tokens", "output_tokens"))
        if prompt is not None and output is not None:
            found.append((float(start), prompt, output))
    return tuple(sorted(found, key=lambda one: one[0]))


def _distribution(text: str) -> Lengths | None:
    """None: a window without requests."""
    pairs = ast.literal_eval(text) if isinstance(text, str) else text
    values = sorted((int(tokens), float(share)) for tokens, share in pairs.items() if float(share) != 0)
    if any(not 0 <= tokens <= 1 << 24 for tokens, _ in values):
        raise ValueError("a length that no request has")
    if any(not 0 < share < 1e12 for _, share in values):
        raise ValueError("a probability that is none")
    if not values:
        return None
    return Lengths(values=tuple(tokens for tokens, _ in values),
                   cumulated=tuple(itertools.accumulate(share for _, share in values)))


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of those that are its."""
    try:
        if path.is_dir():
            for file in sorted(path.rglob("chunk-*")):
                if _NAME.search(file.name) and file.stat().st_size <= MAX_FILE_BYTES:
                    yield file.name, file.read_text(encoding="utf-8-sig")
            return
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and _NAME.search(member.name) and member.size <= MAX_FILE_BYTES:
                    data = archive.extractfile(member)
                    assert data is not None, member.name
                    yield member.name, data.read().decode("utf-8-sig")
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {type(error).__name__}: {error}") from None
