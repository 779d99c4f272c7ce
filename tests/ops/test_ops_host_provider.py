"""Named hosts for Ray's launcher and autoscaler. A shell of this host stands for all of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import FailedPrecondition, InvalidArgument, Unavailable
from pd_ops.launcher.host_provider import AUTH, HEAD_HOST, HEAD_TYPE, ON_HEAD, HostProvider
from pd_ops.launcher.host_runner import HostRunner, exports, packed
from pd_ops.launcher.remote_shell import RemoteShell, on_all

WORKER = {"ray-node-type": "worker", "ray-user-node-type": "decode"}
# Runs its last argument, knows the host's name as $0, and does not get to hosts called "gone".
SHELL = """sh -c 'case "$0" in gone*) echo no route >&2; exit 255;; esac; HOST=$0 sh -c "$1"' {host}"""


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PD_RELAY_STATE_DIR", str(tmp_path))


@pytest.fixture
def shell() -> RemoteShell:
    return RemoteShell.of({"shell": SHELL}, {})


def provider(tmp_path: Path, **more: Any) -> HostProvider:
    return HostProvider({"shell": SHELL, "stop_command": f"echo $HOST >> {tmp_path}/stopped", AUTH: {}, **more}, "c")


def test_hosts_are_taken_and_let_go(tmp_path: Path) -> None:
    ours = provider(tmp_path)
    ours.create_node({"hosts": ["a", "b", "c"]}, WORKER, 2)
    first = ours.non_terminated_nodes({})
    assert [one.partition("~")[0] for one in first] == ["a", "b"]
    ours.terminate_node(first[0])
    assert ours.is_terminated(first[0])
    ours.create_node({"hosts": ["a", "b", "c"]}, WORKER, 1)
    assert [one.partition("~")[0] for one in ours.non_terminated_nodes(WORKER)] == ["b", "c"]  # a: used last
    ours.create_node({"hosts": ["a", "b", "c"]}, WORKER, 1)
    again = ours.non_terminated_nodes({})[-1]
    assert again.startswith("a~")
    assert again != first[0]
    assert (tmp_path / "stopped").read_text() == "a\n"


def test_a_life_that_has_ended_does_not_end_the_next_one(tmp_path: Path) -> None:
    ours = provider(tmp_path)
    ours.create_node({"hosts": ["a"]}, WORKER, 1)
    [first] = ours.non_terminated_nodes({})
    ours.terminate_node(first)
    ours.create_node({"hosts": ["a"]}, WORKER, 1)
    ours.terminate_node(first)
    assert len(ours.non_terminated_nodes({})) == 1
    assert (tmp_path / "stopped").read_text() == "a\n"


def test_the_head_never_ends_itself(tmp_path: Path) -> None:
    ours = provider(tmp_path, **{ON_HEAD: True, HEAD_TYPE: "head", HEAD_HOST: "h"})
    assert ours.non_terminated_nodes({"ray-node-type": "head"}) == ["h"]
    ours.terminate_node("h")
    assert ours.is_running("h")
    assert not (tmp_path / "stopped").exists()


def test_unreachable_hosts_are_named_and_others_taken(tmp_path: Path) -> None:
    ours = provider(tmp_path)
    with pytest.raises(Unavailable, match=r"decode: 2 hosts are wanted, 1 are free .*gone-1 is not reached: no route"):
        ours.create_node({"hosts": ["gone-1", "a"]}, WORKER, 2)
    assert [one.partition("~")[0] for one in ours.non_terminated_nodes({})] == ["a"]


def test_tags_and_what_the_head_is_told(tmp_path: Path) -> None:
    ours = provider(tmp_path)
    ours.create_node({"hosts": ["localhost"]}, WORKER, 1)
    [node] = ours.non_terminated_nodes({})
    ours.set_node_tags(node, {"ray-node-status": "up-to-date"})
    assert ours.node_tags(node) == {**WORKER, "ray-node-status": "up-to-date"}
    assert ours.internal_ip(node) == "127.0.0.1"
    config = {
        "head_node_type": "head", "auth": {"ssh_user": "u"}, "provider": {},
        "available_node_types": {"head": {"node_config": {"hosts": ["h"]}}},
    }
    told = ours.prepare_for_head_node(config)["provider"]
    assert told == {ON_HEAD: True, HEAD_TYPE: "head", HEAD_HOST: "h", AUTH: {"ssh_user": "u"}}


def test_errors_of_a_shell_name_the_host(shell: RemoteShell) -> None:
    assert shell.run("a", "echo $HOST") == "a\n"
    with pytest.raises(Unavailable, match="gone-2 is not reached: no route"):
        shell.run("gone-2", "true")
    with pytest.raises(FailedPrecondition, match=r"a: `echo why >&2; exit 3` failed with 3: why"):
        shell.run("a", "echo why >&2; exit 3")
    with pytest.raises(Unavailable, match=r"a did not finish `sleep 60` in 0\.2 s"):
        shell.run("a", "sleep 60", timeout_s=0.2)
    with pytest.raises(FailedPrecondition, match="cannot run /none/ssh"):
        RemoteShell(prefix=("/none/ssh", "{host}")).run("a", "true")


def test_all_hosts_at_once(shell: RemoteShell) -> None:
    began = time.monotonic()
    answers = on_all(["a", "gone-1", "b"], lambda host: shell.run(host, "echo $HOST"))
    assert (answers["a"], answers["b"], type(answers["gone-1"])) == ("a\n", "b\n", Unavailable)
    assert time.monotonic() - began < 60
    assert on_all([], lambda host: host) == {}


@pytest.fixture
def runner(shell: RemoteShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostRunner:
    monkeypatch.setenv("HOME", str(tmp_path / "home there"))
    (tmp_path / "home there").mkdir()
    return HostRunner(shell, "a")


def test_commands_have_their_environment(runner: HostRunner) -> None:
    command = f"{sys.executable} -c 'import os, json; print(json.loads(os.environ[\"RESOURCES\"])[\"CPU\"] + 1)'"
    assert runner.run(command, environment_variables={"RESOURCES": {"CPU": 1}}, with_output=True) == "2\n"
    assert exports({"A": "it's", "B": 0}) == "export A='it'\"'\"'s'; export B=0; "
    with pytest.raises(InvalidArgument, match="runs commands only"):
        runner.run("true", port_forward=[(1, 2)])


def test_files_and_directories_are_copied(runner: HostRunner, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "kept" / ".venv").mkdir(parents=True)
    (source / "kept" / "a file").write_text("1")
    (source / "kept" / ".venv" / "b").write_text("2")
    runner.run_rsync_up(f"{source}/", "~/there/", {"rsync_exclude": [".venv"]})
    home = tmp_path / "home there"
    assert (home / "there" / "kept" / "a file").read_text() == "1"
    assert not (home / "there" / "kept" / ".venv").exists()
    runner.run_rsync_up(str(source / "kept" / "a file"), "~/deep/one file")
    assert (home / "deep" / "one file").read_text() == "1"
    assert (home / "deep" / "one file").stat().st_mode & 0o077 == 0
    runner.run_rsync_down("~/deep/one file", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "1"
    assert packed(source, [".venv"]) != packed(source, [])
