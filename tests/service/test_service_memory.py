"""The audit of a process's memory adds up, and knows a control group's limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from pd_engine.service.memory import audit, audit_text, available_bytes
from support.commands import environment

MIB = 1024 * 1024


def test_it_adds_up() -> None:
    memory = audit(weights_bytes=3 * MIB, arena_bytes=0, host_cache_bytes=MIB)
    parts = memory.weights_bytes + memory.arena_resident_bytes + memory.host_cache_bytes + memory.code_bytes
    assert abs(memory.resident_bytes - parts - memory.other_bytes) < 2 * MIB
    assert memory.resident_bytes <= memory.peak_resident_bytes
    assert 0 < memory.allocator_used_bytes <= memory.allocator_reserved_bytes
    assert "weights 3 MiB" in audit_text(memory)


TAKES = """
from pd_engine.service.memory import audit
before = audit(weights_bytes=0, arena_bytes=0, host_cache_bytes=0)
held = bytearray(b"x") * (64 * 2**20)
after = audit(weights_bytes=0, arena_bytes=0, host_cache_bytes=0)
print(after.allocator_used_bytes - before.allocator_used_bytes, after.resident_bytes - before.resident_bytes)
"""


def test_it_sees_what_is_taken() -> None:
    """In a process that has nothing freed in store, which would be taken first."""
    done = subprocess.run([sys.executable, "-c", TAKES], env=environment(), capture_output=True, text=True, check=True)
    used, resident = map(int, done.stdout.split())
    assert used > 60 * MIB
    assert resident > 30 * MIB


def test_a_control_group_may_allow_less(tmp_path: Path) -> None:
    host = psutil.virtual_memory().available
    assert available_bytes(tmp_path) > host // 2, "no such files: the host's"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert available_bytes(tmp_path) > host // 2
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{70 * MIB}\n")
    assert available_bytes(tmp_path) == 30 * MIB
    (tmp_path / "memory.current").write_text(f"{170 * MIB}\n")
    assert available_bytes(tmp_path) == 0
