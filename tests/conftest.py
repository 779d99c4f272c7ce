"""Shared fixtures. Puts tests/ on the path so that `support` is importable from every test."""

from __future__ import annotations

import os
import signal
import sys
from itertools import zip_longest
from pathlib import Path

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


# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
