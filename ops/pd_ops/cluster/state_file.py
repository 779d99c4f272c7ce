"""Where a running cluster on this host can be found: one small file a cluster and user, and a lock beside it.

The lock is held for as long as `serve` lives, and the kernel lets go of it however `serve` ends. So a state file
without a held lock is a leftover, and two clusters of one name cannot run at the same time.

    $XDG_RUNTIME_DIR/pd-relay, or ~/.local/state/pd-relay, or <temporary directory>/pd-relay-<uid>
        NAME.json    0600, this module's ClusterState
        NAME.lock    locked (flock) while the cluster lives
        NAME.logs/   the workers' and the router's log files
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Self

from pd_engine.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from pd_engine.settings import CLUSTER_NAME

DIRECTORY_ENVIRONMENT = "PD_RELAY_STATE_DIR"
LOCK_TRIES = 5
LOCK_RETRY_S = 0.02


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterState:
    """What another command needs to know. Addresses are empty until the phase is ready.

    Attributes:
        name: the cluster's.
        pid: of the process that serves it, and may be signalled.
        phase: how far it is.
        model: path of the checkpoint.
        grpc_address, http_address: "host:port" of the router.
        ray_address: of Ray's control store.
        control_address: where the controller listens; see `control_server`.
        log_directory: the actors' log files, on each host.
    """

    name: str
    pid: int
    phase: Phase
    model: str
    grpc_address: str = ""
    http_address: str = ""
    ray_address: str = ""
    control_address: str = ""
    log_directory: str = ""

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "phase": self.phase.value}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises:
        ValueError, TypeError, KeyError: the file is broken, or of another version.
        """
        fields = json.loads(text)
        return cls(**{**fields, "phase": Phase(fields["phase"])})


class StateFile:
    """The state of one cluster, as its own process sees it: takes the lock, writes, cleans up.

    Attributes:
        follows_crash: the last cluster of this name was killed; its processes may be ending still.

    Raises (on entering):
        AlreadyExists: a cluster of this name runs on this host.
        FailedPrecondition: the lock cannot be opened.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._directory = state_directory()
        self._lock_fd = -1
        self._state: ClusterState | None = None
        self.follows_crash = False

    def __enter__(self) -> Self:
        path = _lock_path(self._directory, self._name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FailedPrecondition(f"cannot open {path}: {error.strerror}") from None
        if not _lock(fd):
            os.close(fd)
            raise AlreadyExists(
                f"a cluster named {self._name!r} runs on this host already; stop it (pd-relay stop --cluster "
                f"{self._name}) or give this one another name"
            )
        self._lock_fd = fd
        self.follows_crash = _state_path(self._directory, self._name).exists()  # who ends in order takes it away
        return self

    def __exit__(self, *exc_info: object) -> None:
        _state_path(self._directory, self._name).unlink(missing_ok=True)
        os.close(self._lock_fd)

    @property
    def log_directory(self) -> Path:
        return log_directory(self._name)

    def write(self, state: ClusterState) -> None:
        """Replaces the file at once: a reader sees the old state or the new one."""
        assert self._lock_fd >= 0, "not entered"
        self._state = state
        path = _state_path(self._directory, self._name)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(state.to_json())
        os.replace(temporary, path)

    def move_to(self, phase: Phase) -> None:
        """Writes the state again with another phase."""
        assert self._state is not None, "nothing has been written yet"
        self.write(replace(self._state, phase=phase))

    def move_router(self, grpc_address: str, http_address: str) -> None:
        """Writes the state again if the router is at other addresses now."""
        assert self._state is not None, "nothing has been written yet"
        moved = replace(self._state, grpc_address=grpc_address, http_address=http_address)
        if moved != self._state:
            self.write(moved)


def is_running(name: str) -> bool:
    """Whether a process holds the lock of the cluster of this name."""
    try:
        fd = os.open(_lock_path(state_directory(), name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read_state(name: str) -> ClusterState:
    """The state of a running cluster.

    Raises:
        InvalidArgument: no cluster can have this name.
        NotFound: no cluster of this name runs on this host for this user.
        FailedPrecondition: it runs, but has not written its state yet, or is of another version.
    """
    if not re.fullmatch(CLUSTER_NAME, name):
        raise InvalidArgument(
            f"a cluster's name has 1 to 32 lower-case letters, digits and hyphens, none in front, got {name[:64]!r}"
        )
    if not is_running(name):
        raise NotFound(f"no cluster named {name!r} runs on this host; {_hint(name)}")
    try:
        return ClusterState.from_json(_state_path(state_directory(), name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FailedPrecondition(f"the cluster {name!r} is starting; try again in a moment") from None
    except (ValueError, TypeError, KeyError):
        raise FailedPrecondition(f"the cluster {name!r} was started by another version of pd-relay") from None


def _hint(name: str) -> str:
    """What somebody wants to know who looks for a cluster that does not run."""
    if _state_path(state_directory(), name).exists():  # who ends in order takes it away
        return (
            f"its `pd-relay serve` was killed or has crashed, and its processes have ended with it: their logs are in "
            f"{log_directory(name)}"
        )
    others = running_clusters()
    return f"running: {', '.join(others)}" if others else "start one with pd-relay serve"


def running_clusters() -> list[str]:
    """Names of all clusters that run on this host for this user."""
    return sorted(path.stem for path in state_directory().glob("*.lock") if is_running(path.stem))


def log_directory(name: str) -> Path:
    """Made on first use; the same on every host of a cluster."""
    path = state_directory() / f"{name}.logs"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def state_directory() -> Path:
    """The first usable of the places above, made if it is not there: ours, and nobody else's to write.

    Raises:
        FailedPrecondition: it belongs to another user (someone may have made it in the temporary directory).
    """
    for path in _candidates():
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                continue
        except OSError:
            continue
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise FailedPrecondition(
                f"{path} must belong to you alone (mode 0700); remove it or set {DIRECTORY_ENVIRONMENT}"
            )
        return path
    raise FailedPrecondition(f"no directory for the cluster's state is writable; set {DIRECTORY_ENVIRONMENT}")


def _candidates() -> list[Path]:
    own = os.environ.get(DIRECTORY_ENVIRONMENT)
    if own:
        return [Path(own)]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [
        *([Path(runtime) / "pd-relay"] if runtime and Path(runtime).is_dir() else []),
        Path(os.path.expanduser("~")) / ".local" / "state" / "pd-relay",
        Path(tempfile.gettempdir()) / f"pd-relay-{os.getuid()}",
    ]


def _lock(fd: int) -> bool:
    """Takes the lock. `is_running` holds it for an instant when it looks, hence more than one try."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_RETRY_S)
    return False


def _state_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


def _lock_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.lock"
