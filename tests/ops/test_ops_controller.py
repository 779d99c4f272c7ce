"""What the controller makes of ends, failed starts and removals, over processes that are only pretended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pd_engine.errors import FailedPrecondition, Unavailable
from pd_engine.settings import Settings, load_settings
from pd_ops.cluster import lives
from pd_ops.cluster.actors import RouterStarted, ServingAlready, WorkerPlace, WorkerStarted
from pd_ops.cluster.controller import Controller
from pd_ops.cluster.events import ClusterEvent, EventKind
from pd_ops.cluster.members import MemberState
from pd_ops.cluster.plan import ActorPlan, Role, plan_cluster
from support.leaks import until

TIMEOUT_S = 60.0  # of a wait for what must happen


class PretendedHost:
    """Every process there was.

    Attributes:
        lives: by id, one after the other.
        unstartable: by id, how many starts are still to fail.
        told: what each router was last told: (worker id, life, is expected).
        told_at_start: the workers that it had when it opened its doors.
    """

    def __init__(self) -> None:
        self.lives: dict[str, list[PretendedActor]] = {}
        self.unstartable: dict[str, int] = {}
        self.told: dict[PretendedActor, list[tuple[str, str, bool]]] = {}
        self.told_at_start: dict[PretendedActor, list[str]] = {}
        self.refused = False
        self.may_hear = asyncio.Event()  # what routers after the first are told
        self.may_hear.set()

    def place(self, plan: ActorPlan, settings: Settings, *, life: int, **others: Any) -> PretendedActor:
        actor = PretendedActor(self, plan, settings, life)
        self.lives.setdefault(plan.actor_id, []).append(actor)
        return actor

    def alive(self) -> list[str]:
        return sorted(one.plan.actor_id for lives in self.lives.values() for one in lives if not one.end.is_set())


class PretendedActor:
    def __init__(self, host: PretendedHost, plan: ActorPlan, settings: Settings, life: int) -> None:
        self.plan = plan
        self.settings = settings
        self.life = life
        self.end = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.stopped_by = ""
        self._host = host

    async def call(self, method: str, *args: Any) -> Any:
        if self.end.is_set():
            raise Unavailable(f"{self.plan.actor_id} died")
        match method:
            case "start":
                if self.plan.role is Role.ROUTER:
                    self._host.told_at_start[self] = [place.worker_id for place in args[0]]
                return self._start()
            case "set_workers":
                places: list[WorkerPlace] = args[0]
                if self.life > 1:
                    await self._host.may_hear.wait()
                self._host.told[self] = [(place.worker_id, place.address, place.is_expected) for place in places]
                if self._host.refused:
                    raise FailedPrecondition("a worker is refused")
                return None
            case "stop" | "hand_over":
                self.stopped_by = method
                await self.may_stop.wait()
                return True
        assert method == "is_alive", method
        return True

    def _start(self) -> WorkerStarted | RouterStarted:
        failures = self._host.unstartable.get(self.plan.actor_id, 0)
        if failures:
            self._host.unstartable[self.plan.actor_id] = failures - 1
            raise FailedPrecondition("the checkpoint is broken")
        if self.plan.role is Role.ROUTER:
            port = self.settings.router.grpc_port or 5000 + self.life
            return RouterStarted(pid=1, grpc_address=f"h:{port}", http_address=f"h:{port + 1}")
        return WorkerStarted(pid=1, address=f"life {self.life}", epoch=str(self.life))

    async def ended(self) -> None:
        await self.end.wait()

    def kill(self) -> None:
        self.end.set()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> PretendedHost:
    host = PretendedHost()
    monkeypatch.setattr(lives, "place_actor", host.place)
    return host


@pytest.fixture
async def controller(host: PretendedHost) -> AsyncIterator[Controller]:
    """One prefill and two decode workers, which serve."""
    settings = load_settings(None, {
        "decode.workers": 2, "router.grpc_port": 0, "cluster.restart_delay_s": 0.001,
        "cluster.max_restart_delay_s": 0.001,
    })
    controller = Controller(settings, plan_cluster(settings), host=None, counts_cpus=True)
    ready = await controller.start()
    assert [worker.worker_id for worker in ready.workers] == ["prefill-0", "decode-0", "decode-1"]
    yield controller
    controller.kill()
    assert host.alive() == []


async def next_event(controller: Controller) -> ClusterEvent:
    return await asyncio.wait_for(controller.events.get(), TIMEOUT_S)


async def test_a_dead_worker_is_started_again_and_the_router_told(controller: Controller, host: PretendedHost) -> None:
    [router] = host.lives["router"]
    host.lives["decode-0"][0].end.set()
    lost, restarted = await next_event(controller), await next_event(controller)
    assert (lost.kind, lost.actor_id, lost.details["restarts"]) == (EventKind.LOST, "decode-0", True)
    assert (restarted.kind, restarted.details["epoch"], restarted.details["num_restarts"]) == (
        EventKind.RESTARTED, "2", 1,
    )
    assert host.told[router] == [
        ("prefill-0", "life 1", True), ("decode-0", "life 2", True), ("decode-1", "life 1", True),
    ]
    assert host.alive() == ["decode-0", "decode-1", "prefill-0", "router"]


async def test_one_that_cannot_start_is_tried_again_and_not_waited_for(
    controller: Controller, host: PretendedHost
) -> None:
    [router] = host.lives["router"]
    host.unstartable["prefill-0"] = 3
    host.lives["prefill-0"][0].end.set()
    assert (await next_event(controller)).kind is EventKind.LOST
    hopes = []
    for _ in range(3):
        failed = await next_event(controller)
        assert (failed.kind, failed.details["message"]) == (EventKind.START_FAILED, "the checkpoint is broken")
        hopes.append(host.told[router][0][2])
    assert hopes[0]
    assert (await next_event(controller)).kind is EventKind.RESTARTED
    assert host.told[router][0] == ("prefill-0", "life 5", True)
    assert [one.end.is_set() for one in host.lives["prefill-0"]] == [True] * 4 + [False]


async def test_a_dead_router_comes_back_at_its_ports_and_knows_all(controller: Controller, host: PretendedHost) -> None:
    host.lives["router"][0].end.set()
    assert (await next_event(controller)).actor_id == "router"
    assert (await next_event(controller)).kind is EventKind.RESTARTED
    router = host.lives["router"][1]
    assert (router.settings.router.grpc_port, router.settings.router.http_port) == (5001, 5002)
    assert len(host.told[router]) == 3


async def test_a_worker_that_leaves_is_first_told_of_and_does_not_come_back(
    controller: Controller, host: PretendedHost
) -> None:
    [router], [leaving] = host.lives["router"], host.lives["decode-1"]
    leaving.may_stop.clear()
    removing = asyncio.create_task(controller.remove_worker(controller.workers[2], TIMEOUT_S))
    await until(lambda: leaving.stopped_by != "")
    assert host.told[router][2] == ("decode-1", "life 1", False)
    leaving.may_stop.set()
    assert await removing
    assert leaving.end.is_set()
    assert [worker_id for worker_id, _, _ in host.told[router]] == ["prefill-0", "decode-0"]
    assert (await next_event(controller)).kind is EventKind.REMOVED
    assert len(host.lives["decode-1"]) == 1


async def test_one_that_waits_to_be_started_can_be_removed(controller: Controller, host: PretendedHost) -> None:
    host.unstartable["decode-1"] = 1_000_000
    host.lives["decode-1"][0].end.set()
    await next_event(controller)
    await next_event(controller)
    assert await controller.remove_worker(controller.workers[2], TIMEOUT_S)
    num_lives = len(host.lives["decode-1"])
    while (await next_event(controller)).kind is not EventKind.REMOVED:
        pass
    assert host.alive() == ["decode-0", "prefill-0", "router"]
    await asyncio.sleep(0.01)
    assert len(host.lives["decode-1"]) == num_lives


async def test_a_new_worker_that_is_refused_leaves_nothing(controller: Controller, host: PretendedHost) -> None:
    [router] = host.lives["router"]
    host.refused = True
    with pytest.raises(FailedPrecondition, match="refused"):
        await controller.add_worker(controller.plan.another(Role.DECODE, ["decode-0", "decode-1"]))
    assert host.lives["decode-2"][0].end.is_set()
    assert len(host.told[router]) == len(controller.workers) == 3


async def test_a_router_is_replaced_by_one_that_serves_first(controller: Controller, host: PretendedHost) -> None:
    [before] = host.lives["router"]
    before.may_stop.clear()
    replacing = asyncio.create_task(controller.replace_router(TIMEOUT_S))
    await until(lambda: before.stopped_by != "")
    after = host.lives["router"][1]
    assert (before.stopped_by, before.end.is_set()) == ("hand_over", False)
    assert after.settings.router.grpc_port == 5001
    assert host.told_at_start[after] == ["prefill-0", "decode-0", "decode-1"]
    assert controller.router.state is MemberState.SERVING
    host.lives["decode-0"][0].end.set()  # meanwhile: both must know of its next life
    while (await next_event(controller)).kind is not EventKind.RESTARTED:
        pass
    assert host.told[before] == host.told[after]
    before.may_stop.set()
    assert await replacing
    assert before.end.is_set()


async def test_a_new_router_knows_what_changed_while_it_was_first_told(
    controller: Controller, host: PretendedHost
) -> None:
    host.may_hear.clear()
    replacing = asyncio.create_task(controller.replace_router(TIMEOUT_S))
    await until(lambda: len(host.lives["router"]) == 2 and host.lives["router"][1] in host.told_at_start)
    host.lives["decode-0"][0].end.set()
    while (await next_event(controller)).kind is not EventKind.RESTARTED:
        pass
    host.may_hear.set()
    assert await replacing
    assert host.told[host.lives["router"][1]][1] == ("decode-0", "life 2", True)


async def test_what_has_served_with_settings_of_its_own_is_started_again_with_them(
    controller: Controller, host: PretendedHost
) -> None:
    before = controller.settings
    trial = before.model_copy(update={"engine": before.engine.model_copy(update={"cache_mib": 7})})
    await controller.add_worker(controller.plan.another(Role.DECODE, ["decode-0", "decode-1"]), trial)
    assert (await next_event(controller)).kind is EventKind.ADDED
    for actor_id in ("decode-1", "decode-2", "router"):
        host.lives[actor_id][-1].end.set()
        while (await next_event(controller)).kind is not EventKind.RESTARTED:
            pass
    sizes = {name: [one.settings.engine.cache_mib for one in lives] for name, lives in host.lives.items()}
    usual = before.engine.cache_mib
    assert (sizes["decode-1"], sizes["decode-2"], sizes["router"]) == ([usual] * 2, [7, 7], [usual] * 2)
    host.unstartable["router"] = 1
    with pytest.raises(FailedPrecondition, match="broken"):
        await controller.replace_router(TIMEOUT_S, trial)
    await controller.replace_router(TIMEOUT_S, trial)
    host.lives["router"][-1].end.set()
    while (await next_event(controller)).kind is not EventKind.LOST:
        pass
    assert (await next_event(controller)).kind is EventKind.RESTARTED
    assert [one.settings.engine.cache_mib for one in host.lives["router"]] == [usual, usual, 7, 7, 7]
    assert host.lives["router"][-1].settings.router.grpc_port == 5001


async def test_a_new_router_finds_room_beside_the_one_before_and_in_later_lives(
    controller: Controller, host: PretendedHost,
) -> None:
    """A host that Ray gives one CPU has room for one router; and the CPU of the first may be somebody else's later."""
    await controller.replace_router(TIMEOUT_S)
    host.lives["router"][1].end.set()
    while (await next_event(controller)).kind is not EventKind.LOST:
        pass
    assert (await next_event(controller)).kind is EventKind.RESTARTED
    assert [one.plan.num_cpus for one in host.lives["router"]] == [1, 0, 0]


async def test_a_new_router_that_does_not_start_changes_nothing(controller: Controller, host: PretendedHost) -> None:
    host.unstartable["router"] = 1
    with pytest.raises(FailedPrecondition, match="broken"):
        await controller.replace_router(TIMEOUT_S)
    assert not host.lives["router"][0].end.is_set()
    assert controller.router.state is MemberState.SERVING
    assert host.alive() == ["decode-0", "decode-1", "prefill-0", "router"]


async def test_without_restarts_an_end_is_final(host: PretendedHost) -> None:
    settings = load_settings(None, {"cluster.restart": False})
    controller = Controller(settings, plan_cluster(settings), host=None, counts_cpus=True)
    await controller.start()
    host.lives["decode-0"][0].end.set()
    lost = await next_event(controller)
    assert lost.details == {"restarts": False}
    await until(lambda: host.told[host.lives["router"][0]][1] == ("decode-0", "life 1", False))
    assert len(host.lives["decode-0"]) == 1
    controller.kill()


def found(actor_id: str, plan: ActorPlan, life: int) -> Any:
    """A process that serves, as `find_serving` has it."""
    started: Any = WorkerStarted(pid=2, address=f"h:{life}", epoch=f"e{life}")
    if plan.role is Role.ROUTER:
        started = RouterStarted(pid=2, grpc_address="h:1", http_address="h:2")
    return SimpleNamespace(
        actor=PretendedActor(PretendedHost(), plan, load_settings(None), life), plan=replace(plan, actor_id=actor_id),
        life=life, serving=ServingAlready(started=started, secret="of before"),
    )


async def test_what_serves_is_taken_over_and_only_the_rest_started(host: PretendedHost) -> None:
    settings = load_settings(None, {"decode.workers": 2, "prefill.workers": 2})
    plan = plan_cluster(settings)
    controller = Controller(settings, plan, host=None, counts_cpus=True)
    [_, prefill, _, decode, _] = plan.actors
    missing = controller.adopt([
        found("router", plan.router, 1), found("decode-0", decode, 3), found("decode-7", decode, 1),
        found("prefill-1", prefill, 2),
    ])
    assert [one.actor_id for one in missing] == ["prefill-0"]
    ready = await controller.start()
    assert list(host.lives) == ["prefill-0"]
    assert {worker.worker_id: worker.epoch for worker in ready.workers} == {
        "prefill-0": "1", "prefill-1": "e2", "decode-0": "e3", "decode-7": "e1",
    }
    assert ready.router.grpc_address == "h:1"
    await controller.stop(0.0)
    assert all(member.state is MemberState.SERVING for member in (controller.router, *controller.workers))
    controller.kill()


async def test_nothing_is_left_out_that_the_settings_ask_for(host: PretendedHost) -> None:
    settings = load_settings(None, {"decode.workers": 3})
    plan = plan_cluster(settings)
    controller = Controller(settings, plan, host=None, counts_cpus=True)
    missing = controller.adopt([found("decode-5", plan.workers[-1], 1)])
    assert [one.actor_id for one in missing] == ["router", "prefill-0", "decode-0", "decode-1"]
    controller.kill()
