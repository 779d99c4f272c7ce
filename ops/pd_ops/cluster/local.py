"""A cluster of this host: what `serve`, `demo` and `verify` start, and what they leave when they end: nothing."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pd_engine.settings import Settings
from pd_ops.cluster.control_server import control_server
from pd_ops.cluster.interrupts import Interrupts, interruptible, unless
from pd_ops.cluster.operations import Operations
from pd_ops.cluster.plan import plan_cluster
from pd_ops.cluster.preflight import check_device, check_ops, check_ports
from pd_ops.cluster.ray_runtime import RayRuntime, connected
from pd_ops.cluster.state_file import ClusterState, Phase, StateFile

if TYPE_CHECKING:
    from pd_ops.cluster.controller import Controller
    from pd_ops.cluster.ready import ReadyCluster

DRAIN_S = 10.0


@contextmanager
def local_cluster(settings: Settings) -> Iterator[LocalCluster]:
    """Takes the cluster's name and connects Ray. Enter it in the main thread, outside of an event loop.

    Raises:
        AlreadyExists: a cluster of this name runs on this host.
        InvalidArgument: a port is in use, or both doors have the same.
        FailedPrecondition: a directory cannot be written, the compiled ops are of other sources, or there is no GPU
            where one is asked for.
        Unavailable: Ray did not start.
        KeyboardInterrupt: a signal came.
    """
    with interruptible() as interruption, StateFile(settings.cluster.name) as state_file:
        check_ports(settings.router)
        if settings.engine.device == "cpu":
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
        from pd_ops.cluster.ray_room import check_resources, check_room

        plan = plan_cluster(self.settings, self.runtime.placements_on_this_host())
        if not self.runtime.is_own:
            check_resources(plan)
        controller = Controller(
            self.settings, plan, host=self.runtime.worker_host, counts_cpus=not self.runtime.is_own
        )
        try:
            ready = await unless(interrupts.first, controller.start())
            if ready is None:
                raise KeyboardInterrupt
            operations = Operations(controller, partial(check_room, controller, is_local=self.runtime.is_own))
            async with control_server(operations) as control_address:
                state = replace(
                    self.state, phase=Phase.READY, grpc_address=ready.router.grpc_address,
                    http_address=ready.router.http_address, ray_address=self.runtime.address,
                    control_address=control_address,
                )
                self.state_file.write(state)
                yield RunningCluster(state=state, ready=ready, controller=controller)
                self.state_file.write(replace(state, phase=Phase.STOPPING))
            await unless(interrupts.second, controller.stop(DRAIN_S))
        finally:
            controller.kill()
