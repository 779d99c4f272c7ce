"""Which host a process is on, as far as shared memory goes."""

from __future__ import annotations

import os
from pathlib import Path


def host_id() -> str:
    """Equal for two processes exactly if they run under one kernel and in one network namespace: only then does an
    abstract unix socket of one exist for the other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
