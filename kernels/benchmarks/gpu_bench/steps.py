"""What a run tries, one thing after the other; each that fails, or takes too long, costs the others nothing."""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from gpu_bench.report import Document

GRACE_S = 15  # for the step that is under way when the time is over
KEPT_CHARACTERS = 2000  # of an error's own words, and of its traceback
KEPT_FRAMES = 4  # of each error in the chain that led to it
Save = Callable[[Document], None]


class Clock:
    """How much of the run's time is left."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._end_s - time.monotonic()


class DeviceLost(RuntimeError):
    """Nothing works on the GPU in this process any more, as after an access to memory that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One thing to try.

    Attributes:
        name: what the document calls it.
        run: does it, and puts what it finds into the document. ImportError leaves it out: a package is not installed.
        is_done: whether the document has its result already.
        limit_s: it is ended after so long, or soon after the run's time is over, with the process; 0: never.
        needed_s: it is left out if less time than that is left.
    """

    name: str
    run: Callable[[], None]
    is_done: Callable[[], bool] = lambda: False
    limit_s: int = 0
    needed_s: float = 0.0


def take(steps: Iterable[Step], document: Document, clock: Clock, save: Save, device: torch.device) -> None:
    """Tries each that has neither a result nor an error yet. `save` is called before and after each.

    Raises:
        DeviceLost: after a step that has broken the GPU for this process; the document says which.
    """
    for step in steps:
        if step.name in document["errors"] or step.is_done():
            continue
        if clock.left_s() <= step.needed_s:
            document["left_out"].append(step.name)
            continue
        document["running"] = step.name
        save(document)
        if step.limit_s:  # nobody handles this signal: the process ends, wherever it stands, and `supervise` goes on
            signal.alarm(int(min(step.limit_s, clock.left_s() + GRACE_S)))
        error = _attempt(step, document)
        if step.limit_s:
            signal.alarm(0)
        document["running"] = None
        if error is not None:
            note_error(document, step.name, error)
        save(document)
        gc.collect()
        if device.type == "cuda":
            _clear(step)


def note_error(document: Document, name: str, error: str) -> None:
    """Writes down why a step has no result."""
    document["errors"][name] = error
    document["failed"] = True


def told(error: Exception) -> str:
    """What it says, and below that a short traceback, which begins with the error that led to it."""
    trace = "".join(traceback.format_exception(error, limit=-KEPT_FRAMES))
    return f"{shortened(f'{type(error).__name__}: {error}', KEPT_CHARACTERS)}\n{shortened(trace, KEPT_CHARACTERS)}"


def shortened(text: str, num_characters: int) -> str:
    """Its beginning and its end: what is wrong may stand in either."""
    half = num_characters // 2
    return text if len(text) <= num_characters else f"{text[:half]} [...] {text[-half:]}"


def _attempt(step: Step, document: Document) -> str | None:
    """What went wrong; None if nothing did."""
    began_s = time.monotonic()
    try:
        step.run()
    except ImportError as missing:
        document["left_out"].append(f"{step.name}: {missing}")
        return None
    except Exception as error:  # noqa: BLE001  (recorded; the run goes on)
        traceback.print_exc()
        return told(error)
    print(f"{step.name}: {time.monotonic() - began_s:.1f} s", flush=True)
    return None


def _clear(step: Step) -> None:
    """Gives back the memory of a step."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(f"{step.name}: {error}") from error
