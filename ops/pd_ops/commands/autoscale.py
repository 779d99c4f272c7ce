"""`pd-relay autoscale`: gives the pools of a running cluster sizes that keep to targets, as `pd-relay scale` would."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Annotated

import typer

from pd_engine.errors import FailedPrecondition, PdRelayError, ResourceExhausted, Unavailable
from pd_engine.settings import AutoscaleSettings, load_settings
from pd_ops.autoscale.observation import PoolLook, look
from pd_ops.autoscale.policy import Decision, PoolMemory, decide
from pd_ops.autoscale.schedule import bounds_at
from pd_ops.client import ready_state, router_client
from pd_ops.cluster.control_client import ask_controller
from pd_ops.cluster.control_messages import ScaleRequest, StatusRequest
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.commands import controlled, options
from pd_ops.output import Output

POOLS = ("prefill", "decode")


def command(
    context: typer.Context,
    config: options.Config = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and why; change nothing.")] = False,
    looks: Annotated[int | None, typer.Option(min=1, help="End after so many looks; default: on Ctrl-C.")] = None,
    timeout: controlled.DrainTimeout = controlled.DEFAULT_DRAIN_S,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """Keep the pools of a running cluster at sizes that meet the targets of the settings' section `autoscale`."""
    output = options.start(context, as_json)
    settings = load_settings(config).autoscale
    ready_state(cluster)
    scaler = Autoscaler(settings, cluster=cluster, dry_run=dry_run, drain_s=timeout, output=output)
    asyncio.run(scaler.run(looks))


class Autoscaler:
    """Args:
    dry_run: nothing is changed; pools are taken to have the sizes that they have.
    """

    def __init__(
        self, settings: AutoscaleSettings, *, cluster: str, dry_run: bool, drain_s: float, output: Output
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._dry_run = dry_run
        self._drain_s = drain_s
        self._output = output
        self._memories = dict.fromkeys(POOLS, PoolMemory())

    async def run(self, num_looks: int | None) -> None:
        """Until it is interrupted, or has looked so often."""
        interrupts = Interrupts()
        while num_looks is None or num_looks > 0:
            if await unless(interrupts.first, self._look()) is None:
                self._output.note("interrupted: a step that is under way is finished; pd-relay status shows it")
                return
            num_looks = None if num_looks is None else num_looks - 1
            if num_looks == 0 or await unless(interrupts.first, _slept(self._settings.interval_s)) is None:
                return

    async def _look(self) -> bool:
        """Whether anything was seen."""
        try:
            async with router_client(ready_state(self._cluster).grpc_address) as client:
                loads = await client.all_loads()
        except Unavailable as error:  # the router is being started again
            self._output.note(f"nothing was seen: {error.message}")
            return False
        pools = look(loads.loads, num_in_line=loads.num_requests_waiting, targets=self._settings)
        at, now_s = datetime.now().time(), time.monotonic()
        decisions = {}
        for pool in POOLS:
            bounds = bounds_at(pool, self._settings, at)
            decisions[pool], self._memories[pool] = decide(
                pools[pool], bounds, self._memories[pool], self._settings, now_s
            )
        self._tell(pools, decisions)
        wanted = {pool: decisions[pool].size for pool in POOLS if decisions[pool].size != pools[pool].num_ready}
        if wanted:
            await self._scale(wanted)
        return True

    async def _scale(self, wanted: dict[str, int]) -> None:
        try:
            status = await ask_controller(self._cluster, StatusRequest())
            asked = [worker for worker in status["workers"] if worker["role"] in wanted]
            moving = [worker for worker in asked if worker["state"] != "serving"]
            if moving:
                listed = ", ".join(f"{worker['id']} is {worker['state']}" for worker in moving)
                self._output.note(f"a pool that is not whole is left alone: {listed}")
            busy = {worker["role"] for worker in moving}
            whole = {pool: size for pool, size in wanted.items() if pool not in busy}
            if whole and not self._dry_run:
                request = ScaleRequest(prefill=whole.get("prefill"), decode=whole.get("decode"), drain_s=self._drain_s)
                await ask_controller(self._cluster, request, self._output.note)
        except (FailedPrecondition, ResourceExhausted) as error:  # another operation is under way, or no room is left
            self._output.note(f"not done: {error.message}")
        except PdRelayError as error:
            self._output.note(f"failed: {error.message}")

    def _tell(self, pools: dict[str, PoolLook], decisions: dict[str, Decision]) -> None:
        self._output.document({
            "event": "look", "dry_run": self._dry_run,
            "pools": {
                pool: {
                    "size": pools[pool].num_ready, "wanted": decisions[pool].size, "why": decisions[pool].why,
                    "measured": {
                        pressure.name: {"value": pressure.value, "target": pressure.target}
                        for pressure in pools[pool].pressures
                    },
                }
                for pool in POOLS
            },
        })
        for pool, decision in decisions.items():
            size = pools[pool].num_ready
            change = f"stays {size}"
            if decision.size != size:
                change = f"{'would be ' if self._dry_run else ''}{size} -> {decision.size}"
            self._output.text(f"{pool:8} {change}: {decision.why}")


async def _slept(seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return True
