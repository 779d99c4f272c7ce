"""Shared fixtures. Puts tests/ on the path so that `support` is importable from every test."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: it cannot be changed later

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
