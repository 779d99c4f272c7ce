"""Goes on in a new process when one ends before its work does: crashed, hung, or with a GPU that it can no longer use.

What the process was at is then noted as failed and passed over.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from gpu_bench import report
from gpu_bench.steps import Clock, note_error

ENDED = (0, 1, 2)  # exit statuses of a process that has come to its end
DEVICE_LOST = 3  # it noted what broke the GPU
MIN_SECONDS = 15.0  # to start another process with

Start = Callable[[float, bool], int]  # (seconds left, whether it is to pass over what has failed) -> exit status


def supervise(start: Start, clock: Clock, folder: Path) -> int:
    """Starts processes until one comes to its end. The exit status of the last one; 1 if there was no such."""
    status = start(clock.left_s(), False)
    while status not in ENDED:
        document = report.read(folder)
        if document is None or not (document["running"] or status == DEVICE_LOST):
            return 1
        if document["running"]:
            print(f"{document['running']}: {_why(status)}", flush=True)
            note_error(document, document["running"], _why(status))
            document["running"] = None
        is_late = clock.left_s() < MIN_SECONDS
        if is_late:
            document["left_out"].append("everything after that: there was no time to start again")
        report.write(document, folder)
        if is_late:
            print(report.markdown(document))
            return 1
        status = start(clock.left_s(), True)
    return status


def _why(status: int) -> str:
    if status == -signal.SIGALRM:
        return "it took too long"
    return f"it ended the process: {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"
