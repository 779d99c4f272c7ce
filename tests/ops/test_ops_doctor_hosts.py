"""`pd-relay doctor --hosts`: hosts that are not reached, are not set up, differ, or do not reach one another."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_engine.errors import FailedPrecondition, InvalidArgument, Unavailable
from pd_ops.cluster.plan import Role
from pd_ops.doctor.check import Result
from pd_ops.doctor.hosts import Found, HostReport, examine, lacking_kinds, reports, reports_text
from pd_ops.doctor.on_host import examined
from pd_ops.doctor.reach import Listener, ask
from pd_ops.launcher.cluster_file import ClusterFile, read_cluster_file
from support.checkout import ROOT
from support.commands import run_command

HOSTS = {"head": ["head"], "router": ["r1"], "prefill": ["p1"], "decode": ["d1", "d2"]}
ALL = [host for hosts in HOSTS.values() for host in hosts]
FACTS = {"version": "1", "ops": "o", "checkpoint": "c"}
GOOD = {"model": "/m", "facts": FACTS, "checks": [{"name": "clock", "result": "ok", "sentence": "tsc"}]}


@pytest.fixture
def file(tmp_path: Path) -> ClusterFile:
    """Of five hosts, of which one of decode is a spare. Each is this machine, with a home of its own."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    for name, hosts in HOSTS.items():
        document["available_node_types"][name] |= {"node_config": {"hosts": hosts}}
        if name != "head":
            document["available_node_types"][name]["min_workers"] = 1
    document["provider"]["shell"] = f"env HOME={tmp_path}/{{host}} sh -c"
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return read_cluster_file(path)


def peers_of(host: str) -> dict[str, Any]:
    return {other: {"offset_s": 0.001, "round_trip_s": 0.0004} for other in ALL if other != host}


FINE = Found(
    reached=dict.fromkeys(ALL, 0.2), examined=dict.fromkeys(ALL, GOOD), peers={host: peers_of(host) for host in ALL},
)


def bad(reported: list[HostReport]) -> dict[tuple[str, str], str]:
    return {
        (one.host, check.name): check.sentence
        for one in reported for check in one.checks if check.result in (Result.WARNING, Result.FAILED)
    }


def test_hosts_without_a_fault(file: ClusterFile) -> None:
    reported = reports(file, FINE)
    assert [one.host for one in reported] == ALL
    assert bad(reported) == {}
    assert lacking_kinds(file, reported) == []
    assert reports_text(reported, []).endswith("enough hosts can serve")
    [clock] = [check for check in reported[-1].checks if check.name == "wall clock"]
    assert clock.sentence == "0.001 s behind the head's"


def without(found: Found, host: str) -> Found:
    examined = {other: answer for other, answer in found.examined.items() if other != host}
    return replace(found, reached={**found.reached, host: Unavailable(f"{host} is not reached")}, examined=examined)


FAULTS: dict[str, tuple[Callable[[Found], Found], tuple[str, str], str]] = {
    "not reached": (lambda found: without(found, "p1"), ("p1", "shell"), "p1 is not reached"),
    "not set up": (
        lambda found: replace(found, examined={**found.examined, "p1": FailedPrecondition("no such file")}),
        ("p1", "pd-relay"), "pd-relay does not run there (no such file); pd-relay up sets hosts up",
    ),
    "another checkpoint": (
        lambda found: replace(found, examined={
            **found.examined, "p1": {**GOOD, "facts": {**FACTS, "checkpoint": "d"}},
        }),
        ("p1", "same"), "p1 has another checkpoint in /m than the head",
    ),
    "not reached by another": (
        lambda found: replace(found, peers={
            **found.peers, "p1": {**peers_of("p1"), "d1": {"error": "No route to host"}},
        }),
        ("p1", "network"), "does not reach d1 (No route to host)",
    ),
    "a check that fails": (
        lambda found: replace(found, examined={
            **found.examined, "p1": {**GOOD, "checks": [{"name": "memory", "result": "failed", "sentence": "full"}]},
        }),
        ("p1", "memory"), "full",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_said_with_the_hosts_name(name: str, file: ClusterFile) -> None:
    spoil, where, sentence = FAULTS[name]
    reported = reports(file, spoil(FINE))
    found = bad(reported)
    assert list(found) == [where]
    assert sentence in found[where]
    assert lacking_kinds(file, reported) == ["prefill"]
    text = reports_text(reported, ["prefill"])
    assert sentence in text
    assert text.endswith("too few hosts can serve: prefill")


def test_a_spare_may_be_out(file: ClusterFile) -> None:
    reported = reports(file, without(FINE, "d1"))
    assert lacking_kinds(file, reported) == []
    assert reports_text(reported, []).endswith("enough hosts can serve; those that cannot: d1")


def test_a_clock_that_is_wrong_is_a_warning(file: ClusterFile) -> None:
    peers = {**peers_of("d2"), "head": {"offset_s": -7.5, "round_trip_s": 0.001}}
    reported = reports(file, replace(FINE, peers={**FINE.peers, "d2": peers}))
    found = bad(reported)
    assert list(found) == [("d2", "wall clock")]
    assert found["d2", "wall clock"].startswith("7.500 s ahead of the head's: logs and traces")
    assert lacking_kinds(file, reported) == []


def test_hosts_are_asked_for_real(file: ClusterFile, tmp_path: Path) -> None:
    """One is set up, the others are not; so nobody is there to reach."""
    for host in ALL:
        (tmp_path / host).mkdir()
    checkout = tmp_path / "r1" / "pd-relay"
    (checkout / "ops" / "deploy").mkdir(parents=True)
    (checkout / ".venv").symlink_to(sys.prefix)
    (checkout / "ops" / "deploy" / "settings.yaml").write_text("model: demo\nrouter: {grpc_port: 0, http_port: 0}\n")
    found = examine(file, with_rows=False, tell=lambda sentence: None)
    assert all(isinstance(one, float) for one in found.reached.values())
    router = found.examined["r1"]
    assert not isinstance(router, Exception), router
    assert {check["name"] for check in router["checks"]} == {"versions", "/dev/shm", "open files", "clock", "ports"}
    assert len(router["facts"]["checkpoint"]) == 64
    assert {host for host, one in found.examined.items() if isinstance(one, FailedPrecondition)} == set(ALL) - {"r1"}
    assert found.peers == {}


@pytest.mark.parametrize(("text", "sentence"), [
    ("model: /nowhere\n", "no model '/nowhere'"), ("modell: demo\n", "modell"),
])
def test_settings_that_cannot_be_served(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    answer = examined(path, Role.DECODE, 1, with_rows=False)
    assert (answer["facts"], answer["checks"][0]["result"]) == (None, "failed")
    assert sentence in answer["checks"][0]["sentence"]


def test_memory_is_of_the_workers_that_a_host_has(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\n")
    sentences = {
        check["name"]: check["sentence"] for check in examined(path, Role.DECODE, 3, with_rows=False)["checks"]
    }
    assert "3 workers with" in sentences["memory"]
    assert "ports" not in sentences


def test_a_host_is_reached_and_tells_its_time() -> None:
    listener = Listener(0)
    answer = ask("127.0.0.1", listener.port, time.monotonic() + 60)
    assert abs(answer["offset_s"]) <= answer["round_trip_s"] + 1e-3
    listener.wait_served(1, time.monotonic() + 60)
    assert listener.num_served == 1


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ask("127.0.0.1", port, time.monotonic()) == {"error": "Connection refused"}


def test_the_command(file: ClusterFile) -> None:
    """No host is there: every one of them is named, and the exit status is 1."""
    document = yaml.safe_load(file.path.read_text(encoding="utf-8"))
    document["provider"]["shell"] = "sh -c 'exit 255' {host}"
    file.path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    finished = run_command("doctor", "--hosts", file.path, "--no-rows", "--json")
    assert finished.code == 1, finished.stderr
    assert [one["host"] for one in finished.document["hosts"]] == ALL
    assert not finished.document["can_serve"]
    assert "d2 is not reached" in json.dumps(finished.document)
    refused = run_command("doctor", "--hosts", file.path, "--model", "demo", "--json")
    assert (refused.code, refused.document["error"]["code"]) == (2, "invalid_argument")


def test_a_file_of_a_cloud_names_no_hosts() -> None:
    with pytest.raises(InvalidArgument, match="names no hosts"):
        examine(read_cluster_file(ROOT / "ops" / "deploy" / "aws.yaml"), with_rows=False, tell=print)
