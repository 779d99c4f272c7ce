"""Plays seeds and says how each ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pd_ops.simulation.process import PROCESS
from pd_ops.simulation.world import Violation, World

LOGGERS = ("pd_router", "prefill_worker", "decode_worker", "kv_transfer", "pd_engine")
SEEDS_A_COLLECTION = 20
AFTER_STOP_S = 0.1


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


def play(seed: int, *, with_story: bool = False) -> Played:
    """Plays one seed. The same seed is played alike, event by event."""
    began_s = time.monotonic()
    world = World(seed)
    violation: str | None = None
    with _logged_into(world), _without_collections():
        try:
            world.loop.run_until_complete(world.play())
        except Violation as error:
            violation = str(error)
        digest, virtual_s, num_events = world.story.digest(), world.loop.now_s, world.loop.num_events
        story = world.story.tell() if with_story or violation is not None else ""
        world.is_over = True
        world.loop.run_until_complete(world.end())
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
