"""How many cores this process may use: on a large shared host far fewer than there are."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time, and of how many by the clock


def num_cores(quota: Path = QUOTA) -> int:
    """At least 1."""
    allowed = len(os.sched_getaffinity(0))
    try:
        time_us, of_us = quota.read_text(encoding="utf-8").split()
        return max(1, min(allowed, int(time_us) // int(of_us)))
    except (OSError, ValueError):  # there is none: "max"
        return allowed
