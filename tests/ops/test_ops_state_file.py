"""Finding a running cluster: the state file and its lock."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pd_engine.errors import AlreadyExists, FailedPrecondition, NotFound
from pd_ops.cluster.state_file import (
    DIRECTORY_ENVIRONMENT,
    ClusterState,
    Phase,
    StateFile,
    is_running,
    log_directory,
    read_state,
    running_clusters,
    state_directory,
)

STATE = ClusterState(
    name="one", pid=1, phase=Phase.READY, model="/a", grpc_address="127.0.0.1:1", http_address="127.0.0.1:2"
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state"
    monkeypatch.setenv(DIRECTORY_ENVIRONMENT, str(path))
    return path


def test_a_state_is_found_while_its_lock_is_held(directory: Path) -> None:
    with StateFile("one") as file:
        file.write(STATE)
        assert read_state("one") == STATE
        assert running_clusters() == ["one"]
        assert stat.S_IMODE((directory / "one.json").stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not is_running("one")
    assert not (directory / "one.json").exists()
    with pytest.raises(NotFound, match="no cluster named 'one'"):
        read_state("one")


def test_a_name_is_taken_once() -> None:
    with StateFile("one"), StateFile("two"):
        with pytest.raises(AlreadyExists, match="'one' runs on this host already"), StateFile("one"):
            pass
        assert running_clusters() == ["one", "two"]
        with pytest.raises(NotFound, match="running: one, two"):
            read_state("three")
    with StateFile("one"):
        pass


def test_what_a_killed_process_left_is_no_cluster(directory: Path) -> None:
    script = (
        "import os, signal; from pd_ops.cluster.state_file import *\n"
        "file = StateFile('one').__enter__()\n"
        "file.write(ClusterState(name='one', pid=os.getpid(), phase=Phase.READY, model='/a'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (directory / "one.json").exists()
    assert not is_running("one")
    with pytest.raises(NotFound, match=r"was killed or has crashed.*their logs are in .*one\.logs"):
        read_state("one")
    with StateFile("one") as file:
        assert file.follows_crash
        file.write(STATE)
        assert read_state("one").pid == STATE.pid
    with StateFile("one") as file:
        assert not file.follows_crash


def test_a_cluster_that_has_not_written_its_state_yet(directory: Path) -> None:
    with StateFile("one") as file:
        with pytest.raises(FailedPrecondition, match="starting"):
            read_state("one")
        file.write(STATE)
        (directory / "one.json").write_text('{"name": "one", "colour": "red"}', encoding="utf-8")
        with pytest.raises(FailedPrecondition, match="another version"):
            read_state("one")


def test_a_directory_that_others_may_write_to_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(FailedPrecondition, match="must belong to you alone"):
        state_directory()


def test_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY_ENVIRONMENT)
    runtime, home = tmp_path / "runtime", tmp_path / "home"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("HOME", str(home))
    assert state_directory() == runtime / "pd-relay"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nothing"))
    assert state_directory() == home / ".local/state/pd-relay"
    home_as_file = tmp_path / "file"
    home_as_file.touch()
    monkeypatch.setenv("HOME", str(home_as_file))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert state_directory() == tmp_path / f"pd-relay-{os.getuid()}"


def test_logs_are_beside_the_state(directory: Path) -> None:
    assert log_directory("one") == directory / "one.logs"
    assert log_directory("one").is_dir()
