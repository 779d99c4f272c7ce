"""Room on hosts of the right pool, and what is said where there is none."""

from __future__ import annotations

import pytest

from pd_engine.settings import load_settings
from pd_ops.cluster.host_facts import HostFacts, checkpoint_digest, difference, host_facts
from pd_ops.cluster.host_room import HostRoom, lacking
from pd_ops.cluster.plan import BY_POOL, Placement, everywhere, plan_cluster
from pd_ops.detached import without_flag
from support.checkout import ROOT

SETTINGS = load_settings(None, {"prefill.workers": 1, "decode.workers": 3, "engine.threads": 2})
PLAN = plan_cluster(SETTINGS, BY_POOL)


def host(address: str, pool: str, num_cpus: float) -> HostRoom:
    return HostRoom(address=address, node_id=f"id of {address}", labels={"pool": pool}, num_cpus=num_cpus)


ENOUGH = (host("r", "router", 1), host("p", "prefill", 2), host("d1", "decode", 4), host("d2", "decode", 3))


def test_there_is_room() -> None:
    assert lacking(PLAN.actors, ENOUGH) == []


def test_a_pool_without_hosts_and_one_with_too_few() -> None:
    sentences = lacking(PLAN.actors, [ENOUGH[0], ENOUGH[2], host("p", "elsewhere", 64)])
    assert sentences == [
        "no host with pool=prefill is in the cluster",
        "3 processes of 2 CPUs are to run on hosts with pool=decode, which have room for 2 (d1: 4 CPUs)",
    ]


def test_cpus_of_several_hosts_do_not_add_up_to_a_place() -> None:
    assert lacking(PLAN.workers[:1], [host("a", "prefill", 1), host("b", "prefill", 1)])


def test_a_host_by_its_id() -> None:
    plan = plan_cluster(SETTINGS, everywhere(Placement(node_id="id of d1")))
    assert lacking(plan.actors[:1], ENOUGH) == []
    assert "room for 2" in lacking(plan.workers, ENOUGH)[0]


HERE = HostFacts(version="1", ops="o", checkpoint="c")


@pytest.mark.parametrize(("there", "sentence"), [
    (HERE, None),
    (HostFacts(version="2", ops="o", checkpoint="c"), "h has pd-relay 2, the head 1"),
    (HostFacts(version="1", ops="x", checkpoint="c"), "h has ops of other sources than the head, "
     "under the same version"),
    (HostFacts(version="1", ops="o", checkpoint=""), "h has no checkpoint in /m"),
    (HostFacts(version="1", ops="o", checkpoint="d"), "h has another checkpoint in /m than the head"),
])
def test_a_host_is_compared_with_the_head(there: HostFacts, sentence: str | None) -> None:
    assert difference("h", there, HERE, "/m") == sentence


def test_facts_of_this_host() -> None:
    demo = ROOT / "pd_engine" / "model" / "demo"
    assert host_facts(str(demo)) == host_facts(str(demo))
    assert len(checkpoint_digest(demo)) == 64
    assert checkpoint_digest(ROOT / "nowhere") == ""


@pytest.mark.parametrize("arguments", [
    ["serve", "--detach", "f", "--by-pool"], ["serve", "--by-pool", "--detach=f", "--json"],
    ["serve", "--by-pool", "--detach", "--json"],
])
def test_the_same_command_without_the_flag(arguments: list[str]) -> None:
    assert without_flag(arguments) == ["serve", "--by-pool"]
