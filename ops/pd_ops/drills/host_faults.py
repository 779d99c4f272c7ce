"""What drills do to hosts: one loses its power, its network, or its speed; the head is away for a while."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from pd_engine.contracts import api_pb2
from pd_ops.cluster.control_messages import StatusRequest
from pd_ops.drills.hands import HostFault
from pd_ops.drills.scene import Broken, Scene, host_of

DOWN_S = 5.0
HOSTS_POLL_S = 1.0


async def kill_host(scene: Scene, role: str) -> Broken:
    """The host of the busiest worker. It boots again when a spare has taken over; at once if there is none."""
    worker, also, hosts = await _busiest_host(scene, role)
    host = host_of(worker.address)
    has_spare = any(one["pool"] == worker.role and one["free_cpus"] >= 1 for one in hosts)
    scene.note(f"killing {host}, where {worker.id} runs")
    at_s = time.monotonic()
    await scene.access.hands.do(HostFault.KILL, host)

    async def boot() -> bool:
        await scene.access.hands.do(HostFault.BOOT, host)
        return await _hosts_back(scene, hosts)

    if not has_spare:
        await asyncio.sleep(DOWN_S)
        await scene.access.hands.do(HostFault.BOOT, host)
    return Broken(
        at_s=at_s, target=worker.id, epoch=worker.epoch, is_over_s=time.monotonic(), also=also,
        mend=boot if has_spare else lambda: _hosts_back(scene, hosts),
        details=("a spare host was there" if has_spare else f"no spare: it was booted after {DOWN_S:g} s",),
    )


async def cut_host(scene: Scene, role: str, seconds: float) -> Broken:
    """The host of the busiest worker from the network, for so long."""
    worker, also, hosts = await _busiest_host(scene, role)
    at_s = await _for_a_while(scene, HostFault.CUT, HostFault.HEAL, host_of(worker.address), seconds)
    return Broken(
        at_s=at_s, target=worker.id, epoch=worker.epoch, is_over_s=time.monotonic(), also=also,
        mend=lambda: _hosts_back(scene, hosts), details=(f"it was cut off for {seconds:g} s",),
    )


async def slow_link(scene: Scene, role: str, seconds: float) -> Broken:
    """Of the host of the busiest worker, for so long."""
    worker, also, _ = await _busiest_host(scene, role)
    at_s = await _for_a_while(scene, HostFault.SLOW, HostFault.FAST, host_of(worker.address), seconds)
    return Broken(
        at_s=at_s, is_over_s=time.monotonic(), also=also, details=(f"{worker.id}'s, for {seconds:g} s",)
    )


async def kill_head(scene: Scene, seconds: float) -> Broken:
    """It boots again after so long."""
    hands, head, hosts = scene.access.hands, str(scene.access.head), await _hosts(scene)
    await scene.traffic.wait_streaming()
    scene.note(f"killing the head, {head}")
    at_s = time.monotonic()
    await hands.do(HostFault.KILL, head)
    await asyncio.sleep(seconds)
    await hands.do(HostFault.BOOT, head)
    back_s = time.monotonic()
    await scene.access.start_head(scene.note)
    return Broken(
        at_s=at_s, is_over_s=time.monotonic(), mend=lambda: _hosts_back(scene, hosts),
        details=(f"it was down for {seconds:g} s; a controller served {time.monotonic() - back_s:.1f} s later",),
    )


async def _busiest_host(scene: Scene, role: str) -> tuple[api_pb2.WorkerStatus, tuple[str, ...], list[dict[str, Any]]]:
    """(the worker, others on its host, all hosts), while an answer streams."""
    hosts = await _hosts(scene)
    await scene.traffic.wait_streaming()
    worker = await scene.busiest(scene.target.partition("-")[0] if scene.target else role)
    others = [one for one in (await scene.server_info()).workers if one.id != worker.id]
    return worker, tuple(one.id for one in others if host_of(one.address) == host_of(worker.address)), hosts


async def _for_a_while(scene: Scene, begin: HostFault, end: HostFault, host: str, seconds: float) -> float:
    """When it began."""
    scene.note(f"{begin.value}: {host}, for {seconds:g} s")
    at_s = time.monotonic()
    await scene.access.hands.do(begin, host)
    try:
        await asyncio.sleep(seconds)
    finally:
        await scene.access.hands.do(end, host)
    return at_s


async def _hosts(scene: Scene) -> list[dict[str, Any]]:
    hosts: list[dict[str, Any]] = (await scene.ask_controller(StatusRequest()))["hosts"]
    return hosts


async def _hosts_back(scene: Scene, before: list[dict[str, Any]]) -> bool:
    """Whether as many hosts of each pool are in the cluster as before, in time."""
    wanted, deadline_s = Counter(one["pool"] for one in before), time.monotonic() + scene.give_up_s
    while time.monotonic() < deadline_s:
        if Counter(one["pool"] for one in await _hosts(scene)) >= wanted:
            return True
        await asyncio.sleep(HOSTS_POLL_S)
    return False
