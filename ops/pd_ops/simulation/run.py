"""Plays seeds and says how each ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from pd_ops.simulation.process import PROCESS
from pd_ops.simulation.world import Violation, World

LOGGERS = ("pd_router", "prefill_worker", "decode_worker", "kv_transfer", "pd_engine")
SEEDS_A_COLLECTION = 50
LONGEST_S = 30.0  # of computing, for one seed: a hundred times what one takes
AFTER_STOP_S = 0.1
SIMULATION_BROKE = "the simulation itself broke"


class TooLong(KeyboardInterrupt):
    """A seed does not end. As Ctrl-C does, it goes through whatever catches exceptions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One seed.

    Attributes:
        violation: the first one; None: all was well.
        virtual_s: how long the world lasted, by its own clock.
        digest: of all that happened in it.
        story: told; of a failed seed, or where it was asked for.
    """

    seed: int
    violation: str | None
    num_requests: int
    num_troubles: int
    num_events: int
    virtual_s: float
    seconds: float
    digest: str
    story: str


class _StoryLog(logging.Handler):
    """Log records as lines of a world's story. An error of a living process is what never may be, but for one that was
    stopped just before: what it took for long then may have been its own stop."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        text = record.getMessage()
        was_stopped = process is not None and self._world.loop.now_s < process.went_on_s + AFTER_STOP_S
        if record.levelno >= logging.ERROR and not was_stopped:
            error = record.exc_info[1] if record.exc_info else None
            self._world.complain(
                f"{'world' if process is None else process.label} logs an error: {text}"
                f"{'' if error is None else f' ({type(error).__name__}: {error})'}"
            )
        else:
            self._world.tell(process, text)


def play(seed: int, *, with_story: bool = False, longest_s: float = LONGEST_S) -> Played:
    """Plays one seed. The same seed is played alike, event by event. One that breaks the simulation itself, or does not
    end, has failed like any other."""
    began_s = time.monotonic()
    world = World(seed)
    with _logged_into(world), _without_collections():
        violation = _how_it_ends(world, longest_s)
        digest, virtual_s, num_events = world.story.digest(), world.loop.now_s, world.loop.num_events
        story = world.story.tell() if with_story or violation is not None else ""
        world.is_over = True
        if (broken := _how_it_is_left(world, longest_s)) is not None and violation is None:
            violation, story = broken, world.story.tell()
    return Played(
        seed=seed, violation=violation, num_requests=len(world.wishes), num_troubles=len(world.troubles),
        num_events=num_events, virtual_s=virtual_s, seconds=time.monotonic() - began_s, digest=digest, story=story,
    )


def play_all(seeds: range, goes_on: Callable[[Played], bool] = lambda played: True) -> list[Played]:
    """In order. `goes_on` is asked after each."""
    results = []
    for count, seed in enumerate(seeds, start=1):
        results.append(play(seed))
        if not goes_on(results[-1]):
            break
        if count % SEEDS_A_COLLECTION == 0:
            gc.collect()
    return results


def _how_it_ends(world: World, longest_s: float) -> str | None:
    """What was violated; None: nothing."""
    try:
        with _time_limit(longest_s):
            world.loop.run_until_complete(world.play())
        return None
    except Violation as error:
        return str(error)
    except TooLong as error:
        violation = f"it has not ended after {longest_s:g} s of computing"
        where = traceback.format_exception(error)
    except Exception as error:  # noqa: BLE001 - of the simulation itself: it is told with the seed
        violation = f"{SIMULATION_BROKE}: {type(error).__name__}: {error}"
        where = traceback.format_exception(error)
    world.complain(violation)
    world.tell(None, "".join(where))
    return violation


def _how_it_is_left(world: World, longest_s: float) -> str | None:
    """What breaks where the world lets everything go; None: nothing, or it takes too long."""
    try:
        with contextlib.suppress(TooLong), _time_limit(longest_s):
            world.loop.run_until_complete(world.end())
        return None
    except Exception as error:  # noqa: BLE001 - as above
        broken = f"{SIMULATION_BROKE}: {type(error).__name__}: {error}"
        where = "".join(traceback.format_exception(error))
    world.story.add(world.loop.now_s, "world", f"VIOLATION: {broken}\n{where}")
    return broken


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Of computing by this process, whatever else its machine does. Raises TooLong."""
    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _logged_into(world: World) -> Iterator[None]:
    handler = _StoryLog(world)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Python's collector would close what is left of killed processes whenever it likes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
