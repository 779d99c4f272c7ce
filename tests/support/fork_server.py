"""A process that has imported everything and does nothing, of which others are forked: imports cost more than most of
what tests run in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = [
    "support.handoffs", "pd_ops.cli", "pd_engine.generate", "pd_ops.commands.generate", "pd_ops.commands.status",
    "pd_ops.commands.submit",
]


def start_fork_server() -> ForkServerContext:
    """One for this process; the same again if it runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), before])  # it ignores sys.path
    forkserver.ensure_running()
    os.environ["PYTHONPATH"] = before
    return context
