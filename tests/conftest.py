"""Shared fixtures. Puts tests/ on the path so that `support` is importable from every test."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Generator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: it cannot be changed later

# What is drawn is the same every time: a test fails because something has changed. `make gate` draws anew.
# A busy machine may take its time over an example.
settings.register_profile("repeated", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("searching", settings.get_profile("repeated"), derandomize=False, print_blob=True)
settings.load_profile("repeated")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of journeys, which start processes, alternate with others: of two files that run at once seldom both load
    the machine. Those that have slow tests, and are long without them too, come before others: short ones fill what
    is left over."""
    files = list(dict.fromkeys(item.path for item in items))
    long = {item.path for item in items if item.get_closest_marker("slow")}
    journeys, others = (
        sorted((path for path in files if (path.parent.name == "journey") is wanted), key=lambda path: path not in long)
        for wanted in (True, False)
    )
    turns = [path for pair in zip_longest(journeys, others) for path in pair if path is not None]
    rank = {path: number for number, path in enumerate(turns)}
    items.sort(key=lambda item: rank[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile: files go to processes whole, apart from tests that are cut into parts, of which each goes
    to whoever is free."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "[part-" in nodeid else str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


# What hangs ends, and says where it stood: a test's own timeout raises an exception in it, which a lock held in C, or a
# loop that logs every exception, never lets through. This one writes the stack of every thread and ends the process.
BEYOND_TIMEOUT_S = 60.0
IDLE_S = 1_800.0  # between tests: until another process has done its share
ENDING_S = 300.0
_written_to: list[int] = []


def watch(seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=_written_to[0])


def pytest_configure() -> None:
    _written_to.append(os.dup(2))  # while tests run, standard error is captured


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("timeout")
    watch((marker.args[0] if marker else float(item.config.getini("timeout"))) + BEYOND_TIMEOUT_S)
    try:
        return (yield)
    finally:
        watch(IDLE_S)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    watch(ENDING_S)


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
