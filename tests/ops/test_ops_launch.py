"""What `up` and `down` make of hosts that are not reached, a controller that fails, processes that are left."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_engine.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from pd_ops.launcher import launch
from pd_ops.launcher.cluster_file import ClusterFile, read_cluster_file
from pd_ops.launcher.remote_shell import RemoteShell
from support.checkout import ROOT

# A host is a file: with what each command but `true` prints there. One that is not there is not reached.
SHELL = """sh -c 'cd {directory}; [ -f $0 ] || exit 255; case "$1" in true) ;; *) cat $0;; esac' {{host}}"""
HOSTS = {
    "head": ["head"], "router": ["r1"], "prefill": ["p1", "p2"], "decode": ["d1", "d2", "d3"],
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFile:
    """All hosts are reached, and have nothing left when they are ended."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PD_RELAY_STATE_DIR", str(tmp_path))
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    for name, hosts in HOSTS.items():
        kind = document["available_node_types"][name]
        kind["node_config"]["hosts"] = hosts
        for host in hosts:
            (tmp_path / host).write_text(json.dumps({"ended": [1], "left": []}) + "\n", encoding="utf-8")
    document["available_node_types"]["decode"]["max_workers"] = 3
    document["provider"]["shell"] = SHELL.format(directory=tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return read_cluster_file(path)


def test_a_host_that_is_needed_and_not_reached_is_named(file: ClusterFile) -> None:
    (file.path.parent / "p2").unlink()
    with pytest.raises(Unavailable, match=r"prefill: p2 is not reached"):
        launch.check_reach(file, print)


def test_one_that_can_be_spared_is_noted(file: ClusterFile) -> None:
    notes: list[str] = []
    (file.path.parent / "d1").unlink()
    launch.check_reach(file, notes.append)
    assert notes == ["decode: d1 is not reached: no answer; there are enough others"]


def test_without_a_head_nothing_goes(file: ClusterFile) -> None:
    (file.path.parent / "head").unlink()
    with pytest.raises(Unavailable, match="head: head is not reached"):
        launch.bring_up(file, 1.0, print)


def test_up_returns_what_the_controller_says(file: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(launch, "_ray", lambda *arguments: asked.append(arguments) or "")
    (file.path.parent / "head").write_text(json.dumps({"event": "ready", "grpc_address": "a:1"}) + "\n")
    assert launch.bring_up(file, 5.0, print) == {"event": "ready", "grpc_address": "a:1"}
    assert asked == [("up", "-y", "--no-config-cache", str(file.path))]


def test_up_raises_what_the_controller_ended_with(file: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ray", lambda *arguments: "")
    error = {"error": {"code": "not_found", "message": "no model in /m"}}
    (file.path.parent / "head").write_text(json.dumps(error) + "\n")
    with pytest.raises(NotFound, match="no model in /m"):
        launch.bring_up(file, 5.0, print)


def test_up_gives_up(file: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ray", lambda *arguments: "")
    (file.path.parent / "head").write_text("")
    with pytest.raises(Unavailable, match=r"was not ready in 0\.1 s"):
        launch.bring_up(file, 0.1, print)


def test_a_launcher_that_fails_is_quoted(file: ClusterFile) -> None:
    with pytest.raises(FailedPrecondition, match=r"ray up failed: .*No such option"):
        launch._ray("up", "--no-such-option")


def rewritten(file: ClusterFile, change: str, **values: Any) -> ClusterFile:
    document = yaml.safe_load(file.path.read_text(encoding="utf-8"))
    document["available_node_types"][change] |= values
    file.path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return read_cluster_file(file.path)


@pytest.mark.parametrize(("values", "message"), [
    ({"min_worker": 1}, r"available_node_types\.decode: Additional properties are not allowed \('min_worker'"),
    ({"max_workers": 3, "min_workers": 3}, "`max_workers` is smaller than the sum of `min_workers`"),
])
def test_what_ray_would_refuse_is_said_before_a_host_is_asked(
    file: ClusterFile, values: dict[str, Any], message: str
) -> None:
    (file.path.parent / "head").unlink()
    with pytest.raises(InvalidArgument, match=message):
        launch.bring_up(rewritten(file, "decode", **values), 1.0, print)


def test_up_outlasts_a_moment_in_which_the_head_is_not_reached(
    file: ClusterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([Unavailable("head is not reached"), Unavailable("head is not reached"), '{"event": "ready"}\n', ""])

    def on_head(file: ClusterFile, command: str, timeout_s: float = 0) -> str:
        answer = next(answers)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    notes: list[str] = []
    monkeypatch.setattr(launch, "_ray", lambda *arguments: "")
    monkeypatch.setattr(launch, "_on_head", on_head)
    assert launch.bring_up(file, 60.0, notes.append) == {"event": "ready"}
    assert notes[-1] == "head is not reached" != notes[-2], "once"


def test_a_cloud_gets_its_hosts_back_although_the_head_does_not_answer(
    file: ClusterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ray(*arguments: str) -> str:
        asked.append(arguments[0])
        if arguments[0] == "exec":
            raise FailedPrecondition("ray exec failed: no head")
        return ""

    notes: list[str] = []
    monkeypatch.setattr(launch, "_ray", ray)
    assert launch.take_down(replace(file, head_host=None), notes.append) == {}
    assert asked == ["exec", "down"]
    assert "no head" in notes[0]


def without_command(file: ClusterFile, host: str, left: str) -> ClusterFile:
    """On that host; asked what is left there it says `left`."""
    (file.path.parent / host).write_text(f"gone\n{left}\n")
    case = '*environ*) sed -n 2p $0;; *) grep -q gone $0 && exit 127; cat'
    shell = SHELL.format(directory=file.path.parent).replace("*) cat", case)
    return replace(file, shell=RemoteShell.of({"shell": shell}, {}))


def test_a_host_that_was_never_set_up_has_nothing_to_end(file: ClusterFile) -> None:
    notes: list[str] = []
    ended = launch.take_down(without_command(file, "d3", "none"), notes.append)
    assert "d3" not in ended and len(ended) == 6
    assert notes[-1].startswith("d3 was never set up, so nothing is ended there")


@pytest.mark.parametrize("left", ["some", ""])
def test_a_host_without_the_stop_command_on_which_processes_may_run_is_named(file: ClusterFile, left: str) -> None:
    """As one whose Python has gone since."""
    with pytest.raises(Unavailable, match=r"d3: .* failed with 127: .*processes may be left there"):
        launch.take_down(without_command(file, "d3", left), print)


def test_a_host_says_whether_a_process_has_the_mark() -> None:
    def said(mark: bytes) -> str:
        return subprocess.run(["sh", "-c", launch.ask_what_is_left(mark)], capture_output=True, text=True).stdout

    mark = f"PD_RELAY_TEST_MARK={os.getpid()}-left"
    assert said(mark.encode()) == "none\n"
    name, _, value = mark.partition("=")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**os.environ, name: value}):
        assert said(mark.encode()) == "some\n"


@pytest.mark.parametrize("said", ["", "Stopped all 3 Ray processes.\n", "{broken}\n", "{}\n"])
def test_down_believes_nobody_who_does_not_say_what_is_left(file: ClusterFile, said: str) -> None:
    (file.path.parent / "p1").write_text(said)
    with pytest.raises(Unavailable, match="p1 does not say what it has ended"):
        launch.take_down(file, print)


def test_down_ends_the_head_first_and_then_the_others(file: ClusterFile) -> None:
    notes: list[str] = []
    ended = launch.take_down(file, notes.append)
    assert notes == ["ending head", "ending d1, d2, d3, p1, p2, r1"]
    assert ended.keys() == {"head", "r1", "p1", "p2", "d1", "d2", "d3"}


def test_down_names_what_is_left_and_what_is_not_reached(file: ClusterFile) -> None:
    (file.path.parent / "p1").write_text(json.dumps({"ended": [], "left": [7]}) + "\n")
    (file.path.parent / "d2").unlink()
    with pytest.raises(Unavailable, match=r"d2 is not reached.*p1 has processes left: \[7\]"):
        launch.take_down(file, print)


def test_lines_that_are_no_documents_are_left_out() -> None:
    assert launch.whole_documents('Fetched IP: 1\n{"event": "lost"}\n{"event": "re') == [{"event": "lost"}]
    assert launch.whole_documents('{"event": "lost"}') == []
