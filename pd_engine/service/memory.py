"""What a worker's memory is taken by, as the kernel and the allocator count it. Linux and glibc; torch-free."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

from pd_engine.contracts import worker_pb2 as pb

KIB, MIB = 1024, 1024 * 1024
STATUS = Path("/proc/self/status")
CGROUP = Path("/sys/fs/cgroup")


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]


def audit(*, weights_bytes: int, arena_bytes: int, host_cache_bytes: int) -> pb.MemoryAudit:
    """Of this process, now; the arguments are what it knows to hold."""
    status = _status_bytes()
    reserved, used = _allocator()
    resident, code = status.get("VmRSS", 0), status.get("RssFile", 0)
    arena_resident = min(arena_bytes, status.get("RssShmem", 0))
    known = weights_bytes + arena_resident + host_cache_bytes + code
    return pb.MemoryAudit(
        resident_bytes=resident,
        peak_resident_bytes=status.get("VmHWM", 0),
        weights_bytes=weights_bytes,
        arena_bytes=arena_bytes,
        arena_resident_bytes=arena_resident,
        host_cache_bytes=host_cache_bytes,
        code_bytes=code,
        other_bytes=max(0, resident - known),
        allocator_reserved_bytes=reserved,
        allocator_used_bytes=used,
        available_bytes=available_bytes(),
    )


def audit_text(memory: pb.MemoryAudit) -> str:
    """One line for a log."""
    parts = {
        "resident": memory.resident_bytes, "at most": memory.peak_resident_bytes, "weights": memory.weights_bytes,
        "arena": memory.arena_bytes, "of it touched": memory.arena_resident_bytes,
        "sequences that wait": memory.host_cache_bytes, "code": memory.code_bytes, "other": memory.other_bytes,
        "allocator reserved": memory.allocator_reserved_bytes, "used": memory.allocator_used_bytes,
        "left on this host": memory.available_bytes,
    }
    return ", ".join(f"{name} {num_bytes / MIB:.0f} MiB" for name, num_bytes in parts.items())


def available_bytes(cgroup: Path = CGROUP) -> int:
    """That this process may still take: of the host, or of its control group if that allows less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, current = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
    except OSError:
        return available
    return available if limit.strip() == "max" else max(0, min(available, int(limit) - int(current)))


def _status_bytes() -> dict[str, int]:
    lines = (line.split() for line in STATUS.read_text().splitlines() if line.endswith("kB"))
    return {name.rstrip(":"): int(value) * KIB for name, value, _ in lines}


def _allocator() -> tuple[int, int]:
    """Bytes that malloc has from the kernel, and that are in use of them; zeros without glibc's figures."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0, 0
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.arena + info.hblkhd, info.uordblks + info.hblkhd
