"""Scaling, draining, rolling and changing roles, step by step, over processes that are only pretended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pd_engine.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PdRelayError,
    ResourceExhausted,
    Unavailable,
)
from pd_engine.settings import Settings, load_settings
from pd_ops.cluster.control_messages import (
    DrainRequest,
    RoleRequest,
    RollRequest,
    ScaleRequest,
    SettingsRequest,
    SpoilRequest,
    StatusRequest,
)
from pd_ops.cluster.members import Member, MemberState
from pd_ops.cluster.operations import Caller, Operations
from pd_ops.cluster.other_settings import FIXED
from pd_ops.cluster.plan import ActorPlan, ClusterPlan, Role, plan_cluster
from pd_ops.cluster.restarts import RestartPacer, RestartPolicy
from support.checkout import ROOT


class PretendedFleet:
    """Attributes:
    log: what was done, in order.
    failing: what does not start, or not with these settings.
    least: the smallest number of serving workers that each pool had.
    """

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.settings: Settings = load_settings(None, {"prefill.workers": prefill, "decode.workers": decode})
        self.plan: ClusterPlan = plan_cluster(self.settings)
        self.router = self._member(self.plan.router)
        self._workers = {plan.actor_id: self._member(plan) for plan in self.plan.workers}
        self.log: list[str] = []
        self.failing: Callable[[str, Settings], PdRelayError | None] = lambda actor_id, settings: None
        self.least = dict.fromkeys((Role.PREFILL, Role.DECODE), 1_000)
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    @property
    def workers(self) -> tuple[Member, ...]:
        return tuple(self._workers.values())

    def use_settings(self, settings: Settings) -> None:
        self.settings = settings

    async def add_worker(self, plan: ActorPlan, settings: Settings | None = None) -> Member:
        await self.may_go_on.wait()
        error = self.failing(plan.actor_id, settings or self.settings)
        if error is not None:
            raise error
        assert plan.actor_id not in self._workers
        self.log.append(f"+{plan.actor_id}")
        self._workers[plan.actor_id] = self._member(plan, settings)
        return self._workers[plan.actor_id]

    async def remove_worker(self, member: Member, drain_s: float) -> bool:
        if member.state is MemberState.SERVING:
            member.move(MemberState.DRAINING)
        for role in self.least:
            serving = [one for one in self.workers if one.role is role and one.state is MemberState.SERVING]
            self.least[role] = min(self.least[role], len(serving))
        await asyncio.sleep(0)
        self.log.append(f"-{member.actor_id}")
        del self._workers[member.actor_id]
        return drain_s > 0

    async def replace_router(self, drain_s: float, settings: Settings | None = None) -> bool:
        error = self.failing("router", settings or self.settings)
        if error is not None:
            raise error
        self.log.append("router")
        self.router = self._member(self.plan.router, settings)
        return True

    def member(self, actor_id: str) -> Member:
        return self._workers[actor_id]

    def _member(self, plan: ActorPlan, settings: Settings | None = None) -> Member:
        pacer = RestartPacer(RestartPolicy(first_delay_s=1.0, max_delay_s=1.0))
        return Member(plan=plan, settings=settings or self.settings, pacer=pacer, state=MemberState.SERVING)


def dies(*actor_ids: str) -> Callable[[str, Settings], PdRelayError | None]:
    return lambda actor_id, settings: Unavailable(f"{actor_id} died") if actor_id in actor_ids else None


def operations(fleet: PretendedFleet) -> Operations:
    return Operations(fleet, lambda roles: None)


def caller() -> Caller:
    return Caller(lambda sentence: None)


async def test_a_pool_grows_and_shrinks_by_its_highest_numbers() -> None:
    fleet = PretendedFleet(prefill=1, decode=3)
    result = await operations(fleet).run(ScaleRequest(prefill=3, decode=1, drain_s=1.0), caller())
    assert fleet.log == ["+prefill-1", "+prefill-2", "-decode-2", "-decode-1"]
    assert result == {
        "added": ["prefill-1", "prefill-2"], "removed": {"decode-2": True, "decode-1": True}, "interrupted": False,
        "pools": {"prefill": 3, "decode": 1},
    }
    again = await operations(fleet).run(ScaleRequest(prefill=3, drain_s=1.0), caller())
    assert (again["added"], again["removed"]) == ([], {})


async def test_who_does_not_serve_goes_first() -> None:
    fleet = PretendedFleet(decode=3)
    fleet.member("decode-0").move(MemberState.WAITING)
    await operations(fleet).run(ScaleRequest(decode=2, drain_s=1.0), caller())
    assert fleet.log == ["-decode-0"]


async def test_a_worker_that_does_not_start_is_told_and_the_others_stay() -> None:
    fleet = PretendedFleet(decode=2)
    fleet.failing = dies("prefill-1")
    with pytest.raises(Unavailable, match="prefill-1 died; the cluster has prefill=2, decode=2"):
        await operations(fleet).run(ScaleRequest(prefill=3, decode=1, drain_s=1.0), caller())
    assert fleet.log == ["+prefill-2"]


async def test_no_room_changes_nothing() -> None:
    fleet = PretendedFleet()

    def refuse(roles: Sequence[Role]) -> None:
        raise ResourceExhausted(f"no room for {len(roles)}")

    with pytest.raises(ResourceExhausted, match="no room for 3"):
        await Operations(fleet, refuse).run(ScaleRequest(prefill=3, decode=2, drain_s=1.0), caller())
    assert fleet.log == []


async def test_room_of_a_removed_worker_is_waited_for() -> None:
    """Ray counts it as free some time after the worker's end: a roll over full hosts meets that."""
    fleet = PretendedFleet(prefill=1, decode=2)
    still_taken = {"prefill-0": 3, "decode-0": 3}  # asked so often, its room is still taken

    def check_room(roles: Sequence[Role]) -> None:
        for worker, times in still_taken.items():
            if f"-{worker}" in fleet.log and times > 0:
                still_taken[worker] -= 1
                raise ResourceExhausted("no room yet")

    result = await Operations(fleet, check_room).run(RollRequest(drain_s=1.0), caller())
    assert [one["id"] for one in result["replaced"]] == ["prefill-0", "decode-0", "decode-1", "router"]
    assert still_taken == {"prefill-0": 0, "decode-0": 0}


async def test_a_worker_is_drained_unless_it_is_the_last_that_serves() -> None:
    fleet = PretendedFleet(decode=2)
    result = await operations(fleet).run(DrainRequest(worker="decode-0", drain_s=0.0), caller())
    assert result == {"worker": "decode-0", "drained": False, "pools": {"prefill": 1, "decode": 1}}
    with pytest.raises(FailedPrecondition, match=r"decode-1 is the last decode worker that serves.*scale decode=2"):
        await operations(fleet).run(DrainRequest(worker="decode-1", drain_s=0.0), caller())
    with pytest.raises(NotFound, match="no worker 'decode-7'; it has prefill-0, decode-1"):
        await operations(fleet).run(DrainRequest(worker="decode-7", drain_s=0.0), caller())


async def test_one_that_is_being_started_again_is_no_substitute() -> None:
    fleet = PretendedFleet(decode=2)
    fleet.member("decode-1").move(MemberState.WAITING)
    with pytest.raises(FailedPrecondition, match="last decode worker"):
        await operations(fleet).run(DrainRequest(worker="decode-0", drain_s=0.0), caller())


async def test_a_role_is_changed_by_a_new_process_first() -> None:
    fleet = PretendedFleet(prefill=2)
    result = await operations(fleet).run(RoleRequest(worker="prefill-0", role="decode", drain_s=1.0), caller())
    assert fleet.log == ["+decode-1", "-prefill-0"]
    assert (result["replaced_by"], result["pools"]) == ("decode-1", {"prefill": 1, "decode": 2})
    with pytest.raises(InvalidArgument, match="decode-1 is a decode worker"):
        await operations(fleet).run(RoleRequest(worker="decode-1", role="decode", drain_s=1.0), caller())
    with pytest.raises(FailedPrecondition, match="last prefill worker"):
        await operations(fleet).run(RoleRequest(worker="prefill-1", role="decode", drain_s=1.0), caller())


async def test_a_roll_replaces_all_and_never_has_fewer() -> None:
    fleet = PretendedFleet(prefill=1, decode=2)
    result = await operations(fleet).run(RollRequest(drain_s=1.0), caller())
    assert fleet.log == [
        "+prefill-1", "-prefill-0", "+decode-2", "-decode-0", "+decode-0", "-decode-1", "router",
    ]
    assert fleet.least == {Role.PREFILL: 1, Role.DECODE: 2}
    assert [one["by"] for one in result["replaced"]] == ["prefill-1", "decode-2", "decode-0", "router"]


async def test_without_room_for_one_more_a_worker_is_replaced_after_it_has_gone(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another one of its pool serves meanwhile."""
    monkeypatch.setattr("pd_ops.cluster.operations.ROOM_RETURNS_S", 0.0)
    fleet = PretendedFleet(prefill=2, decode=1)

    def check_room(roles: Sequence[Role]) -> None:
        if len(fleet.workers) >= 3:
            raise ResourceExhausted("no room")

    with pytest.raises(ResourceExhausted, match="no room"):
        await Operations(fleet, check_room).run(RollRequest(drain_s=1.0), caller())
    assert fleet.log == ["-prefill-0", "+prefill-0", "-prefill-1", "+prefill-1"]
    assert fleet.least == {Role.PREFILL: 1, Role.DECODE: 1}


async def test_a_roll_gives_new_processes_other_settings() -> None:
    fleet = PretendedFleet()
    await operations(fleet).run(RollRequest(drain_s=1.0, settings={"engine": {"cache_mib": 7}}), caller())
    assert (fleet.settings.engine.cache_mib, fleet.settings.decode.workers) == (7, 1)
    await operations(fleet).run(RollRequest(drain_s=1.0, settings={"decode": {"max_batch": 3, "workers": 9}}), caller())
    assert (fleet.settings.engine.cache_mib, fleet.settings.decode.max_batch) == (7, 3), "what is not named stays"
    assert all(one.settings == fleet.settings for one in (fleet.router, *fleet.workers))
    await operations(fleet).run(RollRequest(drain_s=1.0, settings={"decode": {"speculate": 2}}), caller())
    assert fleet.settings.decode.workers == 1, "sizes are for scale"


@pytest.mark.parametrize(("named", "message"), [
    ({"engine": {"cache_mb": 7}}, "unknown key engine.cache_mb; did you mean engine.cache_mib?"),
    ({"engine": {"block_size": 32}}, "engine.block_size cannot change while the cluster runs: it has 16, not 32"),
    ({"engine": {"ops": "reference"}}, "engine.ops cannot change while the cluster runs"),
    ({"engine": {"prefill_form": "expanded"}}, "engine.prefill_form cannot change while the cluster runs"),
    ({"transfer": {"checksums": False}}, "transfer.checksums cannot change while the cluster runs"),
    ({"transfer": {"transport": "tcp"}}, "transfer.transport cannot change while the cluster runs"),
    ({"transfer": {"lease_ms": 500}}, "transfer.lease_ms cannot change while the cluster runs"),
    ({"decode": {"speculate": 0}}, "decode.speculate cannot change while the cluster runs: it has 1, not 0"),
    ({"router": {"grpc_port": 1234}}, "router.grpc_port cannot change while the cluster runs"),
    ({"cluster": {"name": "other"}}, "cluster.name cannot change while the cluster runs"),
    ({"decode": 3}, "settings: "),
])
async def test_settings_that_a_running_cluster_cannot_take(named: dict[str, Any], message: str) -> None:
    fleet = PretendedFleet()
    before = fleet.settings
    with pytest.raises(InvalidArgument, match=message):
        await operations(fleet).run(RollRequest(drain_s=1.0, settings=named), caller())
    assert (fleet.log, fleet.settings) == ([], before)


def test_the_docs_name_every_setting_that_a_running_cluster_cannot_take() -> None:
    text = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    assert [key for key in FIXED if not key.startswith("cluster.") and f"`{key}`" not in text] == []


async def test_other_settings_are_given_up_if_no_process_starts_with_them() -> None:
    """What dies later is started again as it was."""
    fleet = PretendedFleet()
    before = fleet.settings
    fleet.failing = dies("prefill-1")
    with pytest.raises(Unavailable):
        await operations(fleet).run(RollRequest(drain_s=1.0, settings={"engine": {"cache_mib": 7}}), caller())
    assert fleet.settings == before


async def test_other_settings_that_the_router_does_not_start_with_leave_each_process_what_it_serves_with() -> None:
    """A router that dies then comes back, and so does each worker."""
    fleet = PretendedFleet()
    before = fleet.settings
    fleet.failing = dies("router")
    with pytest.raises(Unavailable, match="router died; the cluster keeps its settings, and prefill-1, decode-1 the n"):
        await operations(fleet).run(RollRequest(drain_s=1.0, settings={"router": {"max_attempts": 7}}), caller())
    assert fleet.settings == fleet.router.settings == before
    assert [worker.settings.router.max_attempts for worker in fleet.workers] == [7, 7]
    fleet.failing = dies()
    await operations(fleet).run(RollRequest(drain_s=1.0), caller())
    assert all(one.settings == before for one in (fleet.router, *fleet.workers))


async def test_while_a_roll_goes_on_the_cluster_has_the_settings_before() -> None:
    fleet = PretendedFleet()
    seen: list[int] = []
    before = fleet.settings
    fleet.failing = lambda actor_id, settings: seen.append(settings.engine.cache_mib) or (
        None if fleet.settings == before else Unavailable("too early"))
    await operations(fleet).run(RollRequest(drain_s=1.0, settings={"engine": {"cache_mib": 7}}), caller())
    assert (seen, fleet.settings.engine.cache_mib) == ([7, 7, 7], 7)


async def test_where_the_old_worker_goes_first_and_the_new_one_does_not_start_one_as_before_takes_its_place() -> None:
    """And so where the start itself finds no room, as on a GPU."""
    fleet = PretendedFleet(prefill=2)

    def failing(actor_id: str, settings: Settings) -> PdRelayError | None:
        if len(fleet.workers) >= 3:
            return ResourceExhausted("no memory on the GPU")
        return Unavailable(f"{actor_id} died") if settings.engine.cache_mib == 7 else None

    fleet.failing = failing
    with pytest.raises(Unavailable, match=r"prefill-0 died; .*; prefill-0 took its place, with the settings before"):
        await operations(fleet).run(RollRequest(drain_s=1.0, settings={"engine": {"cache_mib": 7}}), caller())
    assert fleet.log == ["-prefill-0", "+prefill-0"]
    assert fleet.least[Role.PREFILL] == 1
    fleet.log = []
    with pytest.raises(ResourceExhausted, match="GPU"):  # the only decode worker does not go first
        await operations(fleet).run(RollRequest(drain_s=1.0, settings={"engine": {"cache_mib": 9}}), caller())
    assert fleet.log == ["-prefill-1", "+prefill-1", "-prefill-0", "+prefill-0"]


async def test_an_operation_whose_caller_left_ends_after_its_step() -> None:
    fleet = PretendedFleet(prefill=1, decode=2)
    leaver = Caller(lambda sentence: leaver.has_left.set())
    result = await operations(fleet).run(RollRequest(drain_s=1.0), leaver)
    assert fleet.log == ["+prefill-1", "-prefill-0"]
    assert result["interrupted"]
    leaver = Caller(lambda sentence: leaver.has_left.set())
    result = await operations(fleet).run(ScaleRequest(prefill=2, decode=1, drain_s=1.0), leaver)
    assert (fleet.log[2:], result["interrupted"]) == (["+prefill-0"], True)


async def test_one_operation_at_a_time() -> None:
    fleet = PretendedFleet()
    both = operations(fleet)
    fleet.may_go_on.clear()
    first = asyncio.create_task(both.run(ScaleRequest(decode=2, drain_s=1.0), caller()))
    await asyncio.sleep(0)
    assert (await both.run(StatusRequest(), caller()))["operation"] == "scale"
    with pytest.raises(FailedPrecondition, match="`scale` is under way"):
        await both.run(RollRequest(drain_s=1.0), caller())
    fleet.may_go_on.set()
    await first
    status = await both.run(StatusRequest(), caller())
    assert status["operation"] is None
    assert [worker["id"] for worker in status["workers"]] == ["prefill-0", "decode-0", "decode-1"]
    assert (await both.run(SettingsRequest(), caller()))["model"] == "demo"


async def test_only_a_drillable_cluster_spoils_what_it_sends() -> None:
    fleet = PretendedFleet()
    with pytest.raises(FailedPrecondition, match="not marked as drillable"):
        await operations(fleet).run(SpoilRequest(worker="prefill-0", pieces=3), caller())
    fleet.settings = load_settings(None, {"cluster.drillable": True})
    asked: list[tuple[str, int]] = []

    async def call(method: str, num_pieces: int) -> int:
        asked.append((method, num_pieces))
        return 5

    member = fleet.member("prefill-0")
    member.actor = SimpleNamespace(call=call)  # type: ignore[assignment]
    answer = await operations(fleet).run(SpoilRequest(worker="prefill-0", pieces=3), caller())
    assert (answer, asked) == ({"worker": "prefill-0", "to_come": 5}, [("spoil", 3)])
    with pytest.raises(NotFound, match="no worker 'prefill-9'"):
        await operations(fleet).run(SpoilRequest(worker="prefill-9", pieces=3), caller())
    member.move(MemberState.WAITING)
    with pytest.raises(FailedPrecondition, match="prefill-0 is waiting"):
        await operations(fleet).run(SpoilRequest(worker="prefill-0", pieces=3), caller())
