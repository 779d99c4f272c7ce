"""The audit of a process's memory adds up, and knows a control group's limit."""

from __future__ import annotations

from pathlib import Path

import psutil

from pd_engine.service.memory import audit, audit_text, available_bytes

MIB = 1024 * 1024


def test_it_adds_up() -> None:
    memory = audit(weights_bytes=3 * MIB, arena_bytes=0, host_cache_bytes=MIB)
    parts = memory.weights_bytes + memory.arena_resident_bytes + memory.host_cache_bytes + memory.code_bytes
    assert abs(memory.resident_bytes - parts - memory.other_bytes) < 2 * MIB
    assert memory.resident_bytes <= memory.peak_resident_bytes
    assert 0 < memory.allocator_used_bytes <= memory.allocator_reserved_bytes
    assert "weights 3 MiB" in audit_text(memory)


def test_it_sees_what_is_taken() -> None:
    before = audit(weights_bytes=0, arena_bytes=0, host_cache_bytes=0)
    held = bytearray(64 * MIB)
    held[:: 4096] = b"x" * len(held[:: 4096])
    after = audit(weights_bytes=0, arena_bytes=0, host_cache_bytes=0)
    assert after.allocator_used_bytes - before.allocator_used_bytes > 60 * MIB
    assert after.resident_bytes - before.resident_bytes > 30 * MIB
    assert len(held) == 64 * MIB


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
