"""A cluster of hosts, each with a network and processes of its own, by the file at the root: up, drilled, down.

It needs root and Linux's namespaces, and takes minutes, as each host starts a Ray: `make test` boots it once, for what
is not marked slow. `make lab` runs all drills.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.lab import Lab, booted_lab
from support.lab_network import why_not

REASON = why_not()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1_200),
    pytest.mark.skipif(REASON is not None, reason=f"NO LAB, so nothing of many hosts is tested: {REASON}"),
]
HOSTS = {"head": ("head",), "router": ("router-1",), "prefill": ("prefill-1",), "decode": ("decode-1", "decode-2")}
SETTINGS = {
    "prefill": {"workers": 1}, "decode": {"workers": 1}, "engine": {"cache_mib": 32},
    "cluster": {"drillable": True, "start_timeout_s": 600.0},
    "router": {"recovery_wait_ms": 300_000},  # the only decode worker's next life, on a busy machine
}
UP_S = 900.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Five hosts, and a cluster on them that serves; one decode host is a spare. Its end is checked too."""
    with booted_lab(tmp_path_factory.mktemp("lab"), SETTINGS, HOSTS) as lab:
        up = lab.command("up", lab.file, "--timeout", "800", "--json", timeout_s=UP_S)
        assert up.code == 0, up.stdout + up.stderr
        yield lab
        down = lab.command("down", lab.file, "--json", timeout_s=UP_S)
        assert down.code == 0, down.stdout + down.stderr
        assert all(not host["left"] for host in down.document["hosts"].values())
        assert lab.network.processes() == {}


def status(lab: Lab) -> dict[str, Any]:
    found = lab.on_head("status", "--json")
    assert found.code == 0, found.stderr
    return found.document


def drilled(lab: Lab, report: Path, *names: str) -> list[dict[str, Any]]:
    """By one command: the next one would import torch, and load the model, once more."""
    done = lab.command(
        "drill", *names, "--hosts", lab.file, "--yes", "--clients", "1", "--distinct", "2", "--recovery", "300",
        "--report", report, "--json", timeout_s=UP_S,
    )
    assert done.code == 0, done.stdout + done.stderr
    drills: list[dict[str, Any]] = done.document["drills"]
    assert [drill["name"] for drill in drills] == list(names)
    for drill in drills:
        assert (drill["num_lost"], drill["num_wrong"], drill["num_leaked_blocks"]) == (0, 0, 0)
    return drills


def test_every_role_is_on_a_host_of_its_pool_and_none_on_the_head(lab: Lab) -> None:
    names = {host.address: host.name.rpartition("-")[0] for host in lab.network.hosts}
    processes = status(lab)["processes"]
    for member in [processes["router"], *processes["workers"]]:
        assert names[member["address"].rpartition(":")[0]] == member["role"]
    assert sorted(host["pool"] for host in processes["hosts"]) == ["decode", "decode", "prefill", "router"]


@pytest.mark.slow
def test_a_pool_grows_as_far_as_its_hosts_go(lab: Lab) -> None:
    refused = lab.on_head("scale", "prefill=2", "--json")
    assert (refused.code, refused.document["error"]["code"]) == (3, "resource_exhausted")
    assert "hosts with pool=prefill, which have room for 0" in refused.document["error"]["message"]


@pytest.mark.slow
def test_the_doctor_finds_nothing_while_it_serves(lab: Lab) -> None:
    """But for the router's ports, which its router has."""
    looked = lab.command("doctor", "--hosts", lab.file, "--no-rows", "--json", timeout_s=UP_S)
    assert looked.code == 0, looked.stdout + looked.stderr
    checks = {(one["kind"], check["name"]): check for one in looked.document["hosts"] for check in one["checks"]}
    assert [where for where, check in checks.items() if check["result"] == "failed"] == []
    assert checks["router", "ports"]["result"] == "warning"
    for kind in ("router", "prefill", "decode"):
        assert checks[kind, "same"]["sentence"] == "version, ops and checkpoint are the head's"
        assert checks[kind, "network"]["sentence"].startswith("reaches the 4 others")
        assert checks[kind, "wall clock"]["result"] == "ok", "they have one clock"


def test_drills(lab: Lab, tmp_path: Path) -> None:
    """With one decode worker: its streams wait for the next life, on the spare if the host is gone."""
    before = status(lab)["processes"]["workers"]
    drills = drilled(lab, tmp_path, "kill-decode", "cut-host", "kill-host")
    after = {worker["id"]: worker for worker in status(lab)["processes"]["workers"]}
    assert [drill["targets"] for drill in drills] == [["decode-0"]] * 3
    assert "a spare host was there" in drills[-1]["details"]
    assert after["prefill-0"]["address"] == before[0]["address"]
    assert after["prefill-0"]["restarts"] == 0 and after["decode-0"]["restarts"] >= len(drills)


@pytest.mark.slow
def test_the_head_loses_its_power(lab: Lab, tmp_path: Path) -> None:
    """Processes go on; the controller that comes back with it takes them over."""
    before = status(lab)["processes"]["workers"]
    drilled(lab, tmp_path, "kill-head")
    after = status(lab)["processes"]["workers"]
    assert [worker["pid"] for worker in after] == [worker["pid"] for worker in before]
    assert [worker["address"] for worker in after] == [worker["address"] for worker in before]
