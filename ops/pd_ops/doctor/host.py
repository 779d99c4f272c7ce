"""Checks of the kernel, the limits and the memory of this host."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import secrets
import shutil
import socket
import time
from pathlib import Path

import psutil

from pd_engine.errors import InvalidArgument, PdRelayError
from pd_engine.model.checkpoint import weight_files
from pd_engine.settings import Settings
from pd_ops.cluster.preflight import check_ports
from pd_ops.cluster.state_file import read_state
from pd_ops.doctor.check import Check, Result

MIB = 1024 * 1024
PROCESS_MIB = 350        # a worker, beyond weights and arena
CLUSTER_MIB = 800        # router and Ray
GOOD_OPEN_FILES = 1024
MIN_OPEN_FILES = 256
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_CLOCK_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
MAX_RESOLUTION_S = 1e-6


def memory_check(
    settings: Settings, model: Path, available_bytes: int | None = None, *, num_workers: int | None = None
) -> Check:
    """Whether weights and arenas of so many workers, by default of all, fit into what is free now."""
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    if num_workers is None:
        num_workers = settings.prefill.workers + settings.decode.workers
    weights = sum(file.stat().st_size for file in weight_files(model))
    needed = num_workers * (weights + settings.engine.cache_mib * MIB)
    wanted = needed + (num_workers * PROCESS_MIB + CLUSTER_MIB) * MIB
    text = (
        f"{available // MIB} MiB are free; {num_workers} workers with {weights // MIB} MiB of weights and "
        f"{settings.engine.cache_mib} MiB of cache take {wanted // MIB} MiB, processes and Ray included"
    )
    if available < needed:
        return Check(name="memory", result=Result.FAILED, sentence=f"{text}: too little")
    return Check(name="memory", result=Result.OK if available >= wanted else Result.WARNING, sentence=text)


def shared_memory_check() -> Check:
    """Does what the shared-memory transport does: a sealed memory file, passed over an abstract unix socket, mapped
    read-only by who gets it."""
    name = "shared memory"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0pd-relay-doctor-{secrets.token_hex(8)}")
        _pass_memory()
    except OSError as error:
        sentence = f"a memory file cannot be passed between processes here: {error.strerror or error}"
        return Check(name=name, result=Result.FAILED, sentence=sentence)
    return Check(name=name, result=Result.OK, sentence="a sealed memory file was passed over a socket and mapped")


def ray_memory_check(settings: Settings, directory: Path = Path("/dev/shm")) -> Check:
    """Ray keeps its object store there, and takes a slower place if it is too small."""
    wanted = settings.cluster.object_store_mib
    if not directory.is_dir():
        return Check(name="/dev/shm", result=Result.WARNING, sentence=f"there is no {directory}; Ray takes /tmp")
    free = shutil.disk_usage(directory).free // MIB
    result = Result.OK if free >= wanted else Result.WARNING
    return Check(name="/dev/shm", result=result, sentence=f"{free} MiB are free; Ray's object store takes {wanted}")


def open_files_check(limits: tuple[int, int] | None = None) -> Check:
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} (hard limit {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= GOOD_OPEN_FILES:
        return Check(name="open files", result=Result.OK, sentence=text)
    result = Result.FAILED if soft < MIN_OPEN_FILES else Result.WARNING
    return Check(name="open files", result=result, sentence=f"{text}: raise it (ulimit -n {GOOD_OPEN_FILES})")


def locked_memory_check(settings: Settings, *, has_rdma: bool, limit: int | None = None) -> Check:
    """RDMA pins the arena; nothing else does."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    text = _limit(soft) if soft == resource.RLIM_INFINITY else f"{soft // MIB} MiB"
    enough = soft == resource.RLIM_INFINITY or soft >= settings.engine.cache_mib * MIB
    if not has_rdma:
        return Check(name="locked memory", result=Result.OK, sentence=f"{text}; only RDMA would need it")
    if enough:
        return Check(name="locked memory", result=Result.OK, sentence=text)
    sentence = f"{text}: less than a worker's {settings.engine.cache_mib} MiB, which RDMA pins (ulimit -l)"
    return Check(name="locked memory", result=Result.WARNING, sentence=sentence)


def ports_check(settings: Settings) -> Check:
    router = settings.router
    wanted = f"{router.host}:{router.grpc_port} (gRPC) and :{router.http_port} (HTTP)"
    try:
        check_ports(router)
    except InvalidArgument as error:
        if (running := _running(settings.cluster.name)) is not None:
            return Check(name="ports", result=Result.WARNING, sentence=f"in use by {running}: {error.message}")
        return Check(name="ports", result=Result.FAILED, sentence=error.message)
    return Check(name="ports", result=Result.OK, sentence=f"{wanted} can be listened on")


def clock_check(source_file: Path = CLOCK_SOURCE) -> Check:
    """Leases count on the monotonic clock, and every step reads it."""
    resolution_s = time.get_clock_info("monotonic").resolution
    try:
        source = source_file.read_text(encoding="ascii").strip()
    except OSError:
        source = "unknown"
    text = f"source {source}, resolution {resolution_s * 1e9:.0f} ns"
    if source in SLOW_CLOCK_SOURCES or resolution_s > MAX_RESOLUTION_S:
        return Check(name="clock", result=Result.WARNING, sentence=f"{text}: slow or coarse, steps will take longer")
    return Check(name="clock", result=Result.OK, sentence=text)


def _pass_memory() -> None:
    """Raises: OSError."""
    size, content = mmap.PAGESIZE, b"pd-relay"
    memory = os.memfd_create("pd-relay-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, size)
        os.pwrite(memory, content, 0)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with left, right:
            socket.send_fds(left, [b"x"], [memory])
            _, [received], _, _ = socket.recv_fds(right, 1, 1)
        try:
            with mmap.mmap(received, size, prot=mmap.PROT_READ) as mapped:
                assert mapped[: len(content)] == content
        finally:
            os.close(received)
    finally:
        os.close(memory)


def _running(cluster: str) -> str | None:
    try:
        state = read_state(cluster)
    except PdRelayError:
        return None
    return f"the cluster {cluster!r} (pid {state.pid})"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
