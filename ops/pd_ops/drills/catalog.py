"""The drills: what each does, and what it expects beside that nothing is lost, wrong or leaked."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pd_engine.errors import FailedPrecondition
from pd_ops.cluster.control_messages import RollRequest, SpoilRequest
from pd_ops.drills.hands import HostFault
from pd_ops.drills.host_faults import cut_host, kill_head, kill_host, slow_link
from pd_ops.drills.scene import Broken, Scene

BURST_REQUESTS = 64
FILL_PROMPT_SHARE = 1 / 4  # of the context or of the caches, a prompt
MAX_FILL_REQUESTS = 256
FILL_CLIENTS = 4
STALL_MARGIN_S = 2.0
CUT_S = 12.0
SLOW_S = 10.0
HEAD_DOWN_S = 5.0
CORRUPT_PIECES = 8
CORRUPT_REQUESTS = 4
ROLL_DRAIN_S = 30.0
NO_ROLE = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """Attributes:
    sentence: what is done.
    run: does it, under traffic that has begun.
    role: of the worker that is broken; empty if it is none.
    breaks_streams: clients may see streams cut; what they ask again is answered.
    refuses: some requests may be answered "not now".
    is_noticed: the router must take the target for lost.
    spares_others: and nobody else, who keeps the epoch that it had.
    faults: of hosts, that it needs.
    """

    sentence: str
    run: Callable[[Scene], Awaitable[Broken]]
    role: str = NO_ROLE
    breaks_streams: bool = False
    refuses: bool = False
    is_noticed: bool = True
    spares_others: bool = True
    faults: tuple[HostFault, ...] = ()


async def _stall(scene: Scene) -> Broken:
    return await scene.stall("decode", scene.settings.router.worker_silence_ms / 1e3 + STALL_MARGIN_S)


async def _fill(scene: Scene) -> Broken:
    """More tokens than all prefill workers' caches hold."""
    num_tokens = await scene.num_cache_tokens("prefill")
    prompt_tokens = max(1, round(min(scene.model.max_context_length, num_tokens) * FILL_PROMPT_SHARE))
    count = min(MAX_FILL_REQUESTS, 1 + num_tokens // prompt_tokens)
    requests = scene.fresh_requests(count, prompt_tokens=prompt_tokens, max_tokens=4)
    scene.note(f"{count} prompts of {prompt_tokens} tokens that nobody has cached")
    at_s = time.monotonic()
    await scene.send(requests, num_clients=FILL_CLIENTS)
    return Broken(
        at_s=at_s, is_over_s=time.monotonic(),
        details=(f"{count} prompts of {prompt_tokens} tokens went through caches of {num_tokens} tokens",),
    )


async def _roll(scene: Scene) -> Broken:
    at_s = time.monotonic()
    result = await scene.ask_controller(RollRequest(drain_s=ROLL_DRAIN_S))
    undrained = [one["id"] for one in result["replaced"] if not one["drained"]]
    return Broken(
        at_s=at_s, is_over_s=time.monotonic(),
        details=(
            f"replaced: {', '.join(one['id'] for one in result['replaced'])}"
            + (f"; not drained in {ROLL_DRAIN_S:g} s: {', '.join(undrained)}" if undrained else ""),
        ),
    )


async def _corrupt(scene: Scene) -> Broken:
    """Prompts that nobody has cached, until pieces of them have gone out wrong."""
    await scene.traffic.wait_streaming()
    worker = await scene.busiest("prefill")
    at_s, deadline_s = time.monotonic(), time.monotonic() + scene.give_up_s
    spoil = SpoilRequest(worker=worker.id, pieces=CORRUPT_PIECES)
    left = (await scene.ask_controller(spoil))["to_come"]
    while left and time.monotonic() < deadline_s:
        await scene.send(scene.fresh_requests(CORRUPT_REQUESTS, prompt_tokens=200, max_tokens=16), num_clients=2)
        left = (await scene.ask_controller(SpoilRequest(worker=worker.id, pieces=0)))["to_come"]
    if left:
        raise FailedPrecondition(f"{worker.id} has sent nothing for {scene.give_up_s:g} s: nothing was corrupted")
    return Broken(
        at_s=at_s, is_over_s=time.monotonic(), details=(f"{CORRUPT_PIECES} pieces of {worker.id} arrived wrong",)
    )


async def _burst(scene: Scene) -> Broken:
    requests = scene.fresh_requests(BURST_REQUESTS, prompt_tokens=64, max_tokens=16)
    at_s = time.monotonic()
    await scene.send(requests, num_clients=BURST_REQUESTS)
    return Broken(at_s=at_s, is_over_s=time.monotonic(), details=(f"{BURST_REQUESTS} requests at one moment",))


DRILLS: Mapping[str, Drill] = {
    "kill-prefill": Drill(
        sentence="The busiest prefill worker is killed.", run=lambda scene: scene.kill("prefill"), role="prefill"
    ),
    "kill-decode": Drill(
        sentence="The busiest decode worker is killed.", run=lambda scene: scene.kill("decode"), role="decode"
    ),
    "kill-router": Drill(
        sentence="The router is killed; clients ask again, and take up where they were.",
        run=lambda scene: scene.kill_router(), breaks_streams=True, refuses=True,
        spares_others=False,
    ),
    "kill-host": Drill(
        sentence="The host of the busiest decode worker loses its power.", run=lambda scene: kill_host(scene, "decode"),
        role="decode", faults=(HostFault.KILL, HostFault.BOOT),
    ),
    "cut-host": Drill(
        sentence="The host of the busiest decode worker is cut from the network, and comes back.",
        run=lambda scene: cut_host(scene, "decode", CUT_S), role="decode", faults=(HostFault.CUT, HostFault.HEAL),
    ),
    "slow-link": Drill(
        sentence="The link of the busiest decode worker's host is slow for a while; nobody is taken for lost.",
        run=lambda scene: slow_link(scene, "decode", SLOW_S), is_noticed=False,
        faults=(HostFault.SLOW, HostFault.FAST),
    ),
    "kill-head": Drill(
        sentence="The head loses its power, and comes back: nothing else notices.",
        run=lambda scene: kill_head(scene, HEAD_DOWN_S), is_noticed=False, faults=(HostFault.KILL, HostFault.BOOT),
    ),
    "stall-worker": Drill(
        sentence="The busiest decode worker stands still for longer than router.worker_silence_ms, and goes on.",
        run=_stall, role="decode",
    ),
    "corrupt-block": Drill(
        sentence="Pieces of blocks from the busiest prefill worker do not arrive as they were sent.", run=_corrupt,
        is_noticed=False,
    ),
    "fill-cache": Drill(
        sentence="More prompts than the prefill workers' caches hold, each of them new.", run=_fill, is_noticed=False,
    ),
    "burst": Drill(
        sentence="Many requests at one moment; nobody is taken for lost.", run=_burst, refuses=True, is_noticed=False,
    ),
    "rolling-restart": Drill(
        sentence="Every worker and the router are replaced, one after the other.", run=_roll, is_noticed=False,
        spares_others=False,
    ),
}
