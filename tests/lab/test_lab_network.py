"""The lab itself, without a cluster on it: a slow link loses packets, and a lab whose process was killed is removed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_router.lifeline import UNANSWERED_S, WorkerLifeline
from support.lab import needed_paths
from support.lab_host import PORT
from support.lab_network import LabNetwork, why_not
from support.lab_records import recorded, remove_abandoned
from support.router_lab import eventually

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"NO LAB: {REASON}")
NUM_PACKETS = 2_000


@pytest.fixture
def network(tmp_path: Path) -> Iterator[LabNetwork]:
    network = LabNetwork.plan(tmp_path, ["a", "b"], kept=needed_paths(tmp_path), environment={})
    with recorded(network, tmp_path / "records"):
        network.make()
        yield network
    assert list((tmp_path / "records").iterdir()) == []
    assert network.bridge not in subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout


def sent(network: LabNetwork, name: str) -> int:
    """Packets of those that were sent to a host that did not get there."""
    before = network.num_dropped(network.host(name))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        for number in range(NUM_PACKETS):
            source.sendto(number.to_bytes(4), (network.host(name).address, 9))
    return network.num_dropped(network.host(name)) - before


def test_a_slow_link_loses_a_share_of_the_packets_until_it_is_fast_again(network: LabNetwork) -> None:
    host = network.host("a")
    network.slow(host)
    network.slow(network.host("b"))
    assert 0 < sent(network, "a") < NUM_PACKETS / 10
    network.fast(host)
    shown = subprocess.run(["tc", "qdisc", "show", "dev", host.link], capture_output=True, text=True, check=True).stdout
    assert "tbf" not in shown and "clsact" not in shown


async def test_a_lifeline_tells_whether_its_host_answers(network: LabNetwork) -> None:
    """Its kernel does, for as long as the way there is open; its processes need not."""
    host = network.host("a")
    network.boot(host)
    line = WorkerLifeline("decode-0", f"{host.address}:1", PORT)  # the host's door, which says nothing first
    loop = asyncio.get_running_loop()
    ending, begun_s = asyncio.create_task(line.until_ended()), loop.time()
    while loop.time() < begun_s + 2 * UNANSWERED_S:
        assert not line.is_unanswered() and not ending.done()
        await asyncio.sleep(0.1)
    network.cut(host)
    await eventually(line.is_unanswered)
    network.heal(host)
    await eventually(lambda: not line.is_unanswered())
    network.kill(host)
    await eventually(line.is_unanswered)
    ending.cancel()


def test_a_lab_whose_process_was_killed_is_removed_and_one_in_use_is_not(network: LabNetwork, tmp_path: Path) -> None:
    records = tmp_path / "records"
    lost = LabNetwork.plan(tmp_path / "lost", ["c"], kept=[], environment={})
    (tmp_path / "lost").mkdir()
    lost.make()
    [host] = lost.hosts
    left = subprocess.Popen(["ip", "netns", "exec", host.namespace, "sleep", "1000"])
    listed = ["ip", "netns", "pids", host.namespace]
    while str(left.pid) not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
        assert left.poll() is None
        time.sleep(0.01)
    (records / lost.bridge).write_text(lost.to_json(), encoding="utf-8")
    assert remove_abandoned(records) == [lost.bridge]
    assert left.wait() == -9
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert lost.bridge not in links and network.bridge in links
    assert host.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
