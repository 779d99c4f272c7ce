"""Ray under a cluster: started here for this cluster alone, or joined where it already runs.

A Ray of our own is small: no dashboard, no usage reports, none of the processes that would do nothing for us, the
smallest object store (no request touches it), and just as many idle processes at the start as actors will need. It
lives and dies with this process; a guardian sees to it if we are killed. It listens on the loopback address only, and
lets nobody in without its token (its default for a cluster that `ray.init` starts).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from pd_engine.errors import Unavailable
from pd_engine.settings import ClusterSettings
from pd_ops.cluster.interrupts import uninterrupted
from pd_ops.cluster.plan import Placement, Role, everywhere
from pd_ops.cluster.processes import Guarded, descendants, end_processes, guarded

LOOPBACK = "127.0.0.1"
STOP_GRACE_S = 5.0  # none for a start that was interrupted: nothing serves yet

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leaves CUDA_VISIBLE_DEVICES of actors without GPUs alone
    "RAY_worker_niceness": "0",                 # Ray's 15 is for batch work: whatever else runs here would go first
    "RAY_memory_monitor_refresh_ms": "0",       # Ray would kill a worker that it cannot replace when the host is full
    "MALLOC_ARENA_MAX": "1",                    # glibc's arenas a thread would cost workers tens of MB
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",           # Ray would print in our terminal that a worker died; all is skipped
    "TOKENIZERS_PARALLELISM": "false",
}

# What Ray does on systems where it has no clusters of many hosts: it takes 127.0.0.1 for this host's address, and then
# its processes listen nowhere else. (An address that is passed to ray.init is replaced by that of an interface.)
OWN_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# Methods of Ray's node that start a process each: the autoscaler's monitor (no node is ever added), the monitor of log
# files (`log_to_driver` is off), and the API server, waited for, which without a dashboard has usage reports only.
# `ray.init` has no settings for them.
UNUSED_PROCESSES = ("start_monitor", "start_log_monitor", "start_api_server")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRuntime:
    """A connected Ray.

    Attributes:
        address: of its control store.
        node_id: this host's node.
        is_own: started here, and ends with us.
    """

    address: str
    node_id: str
    is_own: bool

    @property
    def worker_host(self) -> str | None:
        """That workers listen on: nobody else need reach those of a Ray of our own."""
        return LOOPBACK if self.is_own else None

    def placements_on_this_host(self) -> Mapping[Role, Placement]:
        return everywhere(Placement(node_id=self.node_id))


@contextmanager
def connected(settings: ClusterSettings, num_cpus: int) -> Iterator[RayRuntime]:
    """Ray for the time of the context; afterwards no process of it is left on this host, if it was started here.

    Must be entered in the main thread: Ray's processes are tied to the thread that starts them.

    Args:
        num_cpus: that a Ray of our own shall have for actors.

    Raises:
        Unavailable: Ray did not start, or cannot be reached at `settings.ray_address`.
    """
    with guarded() as guard:
        own = OWN_ENVIRONMENT if settings.ray_address is None else {}
        os.environ.update(ENVIRONMENT | own | dict(os.environ) | guard.environment)
        ray: Any = importlib.import_module("ray")  # only now: it reads the environment when it is imported
        grace_s = STOP_GRACE_S
        try:
            context = _init(ray, settings, num_cpus, guard)
            runtime = ray.get_runtime_context()
            yield RayRuntime(
                address=context.address_info["gcs_address"], node_id=runtime.get_node_id(),
                is_own=settings.ray_address is None,
            )
        except KeyboardInterrupt:
            grace_s = 0.0
            raise
        finally:
            _shut_down(ray, guard, grace_s)


def _init(ray: Any, settings: ClusterSettings, num_cpus: int, guard: Guarded) -> Any:
    common = {"namespace": f"pd-relay-{settings.name}", "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if settings.ray_address is not None:
            return ray.init(address=settings.ray_address, **common)
        with _without_unused_processes(ray):
            return ray.init(
                address="local", num_cpus=num_cpus, num_gpus=0, include_dashboard=False,
                object_store_memory=settings.object_store_mib * 2**20,
                _temp_dir=str(guard.directory), **common,
            )
    except Exception as error:  # whatever Ray raises: of a start that takes too long, a plain Exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if settings.ray_address is None:
            raise Unavailable(
                f"Ray could not start: {reason}; a busy or full host is the usual reason: look at its load, its memory "
                f"and {guard.directory.parent}, and try again"
            ) from error
        raise Unavailable(
            f"Ray could not be reached at {settings.ray_address}: {reason}; if it asks for a token, set "
            f"RAY_AUTH_MODE=token and have its token in ~/.ray/auth_token"
        ) from error


@contextmanager
def _without_unused_processes(ray: Any) -> Iterator[None]:
    """A Ray that is started meanwhile has none of `UNUSED_PROCESSES`; one that names them otherwise has them all the
    same, and serves."""
    try:
        node = ray._private.node.Node
    except AttributeError:
        yield
        return
    starts = {name: getattr(node, name) for name in UNUSED_PROCESSES if hasattr(node, name)}
    for name in starts:
        setattr(node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(node, name, start)


def _start_nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of a process."""


def _shut_down(ray: Any, guard: Guarded, grace_s: float) -> None:
    """Disconnects; what was started here is ended, and waited for."""
    with uninterrupted():
        _end_all(ray, guard, grace_s)


def _end_all(ray: Any, guard: Guarded, grace_s: float) -> None:
    processes = [process for process in descendants() if process.pid != guard.guardian_pid]
    names = {process.pid: _name(process) for process in processes}
    ray.shutdown()
    killed = end_processes(processes, grace_s)
    if killed and grace_s > 0:
        log.warning("processes that had to be killed: %s", ", ".join(f"{names[pid]} ({pid})" for pid in killed))


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "ended"
