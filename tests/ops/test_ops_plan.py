"""Which actors a cluster has, and where they may run."""

from __future__ import annotations

import pytest

from pd_engine.errors import InvalidArgument
from pd_engine.settings import load_settings
from pd_ops.cluster.plan import Placement, Role, check_placeable, everywhere, plan_cluster

SETTINGS = load_settings(None, {"prefill.workers": 2, "decode.workers": 3, "engine.threads": 4})


def test_ids_and_cpus() -> None:
    plan = plan_cluster(SETTINGS)
    assert [actor.actor_id for actor in plan.actors] == [
        "router", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2",
    ]
    assert [actor.role for actor in plan.workers] == [Role.PREFILL] * 2 + [Role.DECODE] * 3
    assert plan.num_cpus == 1 + 5 * 4


def test_another_worker_has_the_lowest_number_that_is_free() -> None:
    placements = {role: Placement(label_selector={"pool": role.value}) for role in Role}
    plan = plan_cluster(SETTINGS, placements)
    assert plan.another(Role.DECODE, []).actor_id == "decode-0"
    another = plan.another(Role.DECODE, ["decode-0", "decode-2", "prefill-1"])
    assert (another.actor_id, another.num_cpus) == ("decode-1", 4)
    assert another.placement == placements[Role.DECODE]


def test_each_role_has_its_own_placement() -> None:
    placements = {role: Placement(label_selector={"pool": role.value}) for role in Role}
    plan = plan_cluster(SETTINGS, placements)
    assert {actor.placement.label_selector["pool"] for actor in plan.workers if actor.role is Role.DECODE} == {"decode"}
    check_placeable(plan, {"a": {"pool": "router"}, "b": {"pool": "prefill", "x": "y"}, "c": {"pool": "decode"}})
    with pytest.raises(InvalidArgument, match="prefill-0 must run where pool=prefill"):
        check_placeable(plan, {"a": {"pool": "router"}, "c": {"pool": "decode"}})


def test_a_node_must_be_there_and_fit() -> None:
    plan = plan_cluster(SETTINGS, everywhere(Placement(node_id="b", label_selector={"zone": "1"})))
    check_placeable(plan, {"b": {"zone": "1"}})
    with pytest.raises(InvalidArgument, match="not in the cluster"):
        check_placeable(plan, {"a": {"zone": "1"}})
    with pytest.raises(InvalidArgument, match="zone=1"):
        check_placeable(plan, {"a": {"zone": "1"}, "b": {"zone": "2"}})
