"""A cluster of this host: what `serve`, `demo` and `verify` start, and what they leave when they end: nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pd_engine.errors import InvalidArgument
from pd_engine.settings import Settings
from pd_ops.cluster.actors import RouterStarted
from pd_ops.cluster.control_server import control_server
from pd_ops.cluster.interrupts import Interrupts, interruptible, unless
from pd_ops.cluster.operations import Operations
from pd_ops.cluster.plan import BY_POOL, ClusterPlan, plan_cluster
from pd_ops.cluster.preflight import check_device, check_ops, check_ports
from pd_ops.cluster.processes import GUARDIAN_TIMEOUT_S
from pd_ops.cluster.ray_runtime import RayRuntime, connected
from pd_ops.cluster.state_file import ClusterState, Phase, StateFile

if TYPE_CHECKING:
    from pd_ops.cluster.controller import Controller
    from pd_ops.cluster.ready import ReadyCluster

DRAIN_S = 10.0

log = logging.getLogger(__name__)


@contextmanager
def local_cluster(settings: Settings) -> Iterator[LocalCluster]:
    """Takes the cluster's name and connects Ray. Enter it in the main thread, outside of an event loop.

    Raises:
        AlreadyExists: a cluster of this name runs on this host.
        InvalidArgument: a port is in use, or both doors have the same; pools have hosts, but no Ray to join is named.
        FailedPrecondition: a directory cannot be written, the compiled ops are of other sources, or there is no GPU
            where one is asked for.
        Unavailable: Ray did not start.
        KeyboardInterrupt: a signal came.
    """
    if settings.cluster.by_pool and settings.cluster.ray_address is None:
        raise InvalidArgument("cluster.by_pool places processes on hosts of a Ray that runs: give --ray-address")
    with interruptible() as interruption, StateFile(settings.cluster.name) as state_file:
        by_pool = settings.cluster.by_pool  # then ports and ops of other hosts matter, not of this one
        if not by_pool:
            check_ports(settings.router, GUARDIAN_TIMEOUT_S if state_file.follows_crash else 0.0)
        if settings.engine.device == "cpu" and not by_pool:
            check_ops(settings.engine.ops)
        elif settings.cluster.ray_address is None:  # else workers may be on other hosts, and look there
            check_device(settings.engine)
        state = ClusterState(
            name=settings.cluster.name, pid=os.getpid(), phase=Phase.STARTING, model=settings.model,
            log_directory=str(state_file.log_directory),
        )
        state_file.write(state)
        plan = plan_cluster(settings)
        with connected(settings.cluster, plan.num_cpus) as runtime:
            interruption.check()
            yield LocalCluster(settings=settings, state_file=state_file, state=state, runtime=runtime)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCluster:
    """A cluster that serves: where to reach it, and its controller."""

    state: ClusterState
    ready: ReadyCluster
    controller: Controller
    state_file: StateFile

    def keep_addresses(self) -> None:
        """A router that was started again may be on another host."""
        router = self.controller.router.started
        if isinstance(router, RouterStarted):
            self.state_file.move_router(router.grpc_address, router.http_address)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCluster:
    """Its name is taken and Ray is connected; `running` starts and ends the rest."""

    settings: Settings
    state_file: StateFile
    state: ClusterState
    runtime: RayRuntime

    @asynccontextmanager
    async def running(self, interrupts: Interrupts) -> AsyncIterator[RunningCluster]:
        """The cluster, ready to serve. At the end running requests may finish, in a bounded time; a second signal
        ends it at once.

        Raises:
            KeyboardInterrupt: a signal came while it was starting.
            PdRelayError: of the actor that could not start.
        """
        from pd_ops.cluster.controller import Controller  # Ray's environment is set by now
        from pd_ops.cluster.ray_room import check_resources, check_room, host_documents

        by_pool = self.settings.cluster.by_pool
        plan = plan_cluster(self.settings, BY_POOL if by_pool else self.runtime.placements_on_this_host())
        if not self.runtime.is_own and not by_pool:
            check_resources(plan)
        controller = Controller(
            self.settings, plan, host=self.runtime.worker_host, counts_cpus=not self.runtime.is_own
        )
        try:
            start = self._start_on_hosts(controller, plan) if by_pool else controller.start()
            ready = await unless(interrupts.first, start)
            if ready is None:
                raise KeyboardInterrupt
            operations = Operations(
                controller, partial(check_room, controller, is_local=self.runtime.is_own),
                host_documents if by_pool else list,
            )
            async with control_server(operations) as control_address:
                state = replace(
                    self.state, phase=Phase.READY, grpc_address=ready.router.grpc_address,
                    http_address=ready.router.http_address, ray_address=self.runtime.address,
                    control_address=control_address,
                )
                self.state_file.write(state)
                yield RunningCluster(
                    state=state, ready=ready, controller=controller, state_file=self.state_file
                )
                self.state_file.move_to(Phase.STOPPING)
            await unless(interrupts.second, controller.stop(DRAIN_S))
        finally:
            controller.kill()

    async def _start_on_hosts(self, controller: Controller, plan: ClusterPlan) -> ReadyCluster:
        """As `Controller.start`, once the hosts are there; what serves there already is taken over."""
        from pd_ops.cluster.adoption import find_serving
        from pd_ops.cluster.host_check import check_hosts
        from pd_ops.cluster.ray_room import live_hosts, wait_for_hosts

        missing = controller.adopt(await find_serving(self.settings, plan))
        await wait_for_hosts(missing, self.settings.cluster.start_timeout_s, log.warning)
        await check_hosts(live_hosts(), self.settings.model)
        return await controller.start()
