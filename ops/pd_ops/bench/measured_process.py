"""The measured side of a benchmark: a process of its own for each implementation, driven by lines of JSON.

The bench sends {"call": "greedy" | "measure", ...} lines on standard input and reads one line for each; a process that
waits uses no CPU, so that the bench can take turns between them. The end of the input ends the process.

Standard library only, and nothing else of this project: peers run it in environments of their own (`ops/peers`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TextIO

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What one run of a case took: seconds of the clock and of this process's CPU time, all threads together.

    `parts` are further sums, such as drafted tokens, or the seconds of a part.
    """

    num_tokens: int
    wall_s: float
    cpu_s: float
    parts: dict[str, float] = field(default_factory=dict)


class Measured(Protocol):
    """One loaded model of one implementation."""

    def describe(self) -> Document:
        """Versions, and what was chosen."""

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely continuation: whether implementations compute the same function."""

    def prefill(self, prompt: Sequence[int]) -> Timed:
        """Reads one prompt, up to the logits of its last token."""

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int, speculate: int) -> Timed:
        """Continues all prompts (read before, untimed) together, greedily, `num_steps` steps."""


class Stopwatch:
    """Measures its `with` block."""

    wall_s = 0.0
    cpu_s = 0.0

    def __enter__(self) -> Stopwatch:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wall_s = time.perf_counter() - self._wall_s
        self.cpu_s = time.process_time() - self._cpu_s


def repeated(run: Callable[[], Timed], min_s: float) -> Timed:
    """Runs a case, at least once, until all runs together have taken `min_s` of CPU time; their sum."""
    runs = [run()]
    while sum(timed.cpu_s for timed in runs) < min_s:
        runs.append(run())
    names = {name for timed in runs for name in timed.parts}
    return Timed(
        num_tokens=sum(timed.num_tokens for timed in runs),
        wall_s=sum(timed.wall_s for timed in runs),
        cpu_s=sum(timed.cpu_s for timed in runs),
        parts={name: sum(timed.parts.get(name, 0.0) for timed in runs) for name in sorted(names)},
    )


def serve(load: Callable[[Document], Measured]) -> int:
    """The process: loads what its argument, a JSON object, describes; says so; answers until its input ends."""
    lines = _claim_stdout()
    try:
        measured = load(json.loads(sys.argv[1]))
        ready: Document = {"ready": measured.describe()}
    except Exception as error:  # the process boundary
        _send(lines, {"error": f"{type(error).__name__}: {error}"})
        raise
    _send(lines, ready)
    for line in sys.stdin:
        try:
            answer = _answer(measured, json.loads(line))
        except Exception as error:  # noqa: BLE001 - the process boundary; the bench decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        _send(lines, answer)
    return 0


def _answer(measured: Measured, request: Document) -> Document:
    if request["call"] == "greedy":
        return {"token_ids": measured.greedy(request["prompt"], request["num_tokens"])}
    prompts = request["prompts"]
    if request["case"] == "prefill":
        timed = repeated(lambda: measured.prefill(prompts[0]), request["min_s"])
    else:
        timed = repeated(
            lambda: measured.decode(prompts, request["num_steps"], request["speculate"]), request["min_s"]
        )
    return {
        "num_tokens": timed.num_tokens, "wall_s": timed.wall_s, "cpu_s": timed.cpu_s, "parts": timed.parts,
    }


def _claim_stdout() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lines


def _send(lines: TextIO, document: Document) -> None:
    lines.write(json.dumps(document) + "\n")
    lines.flush()
