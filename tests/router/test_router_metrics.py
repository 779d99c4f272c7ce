"""/metrics: names that people know, and what they say of requests that took every way through the router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import InvalidArgument, Unavailable
from pd_router.placement import Placement, PrefillKind
from pd_router.placement_reason import Reason, reason_of
from pd_router.pools import PlacementRequest, PrefixOffer, Snapshot, WorkerView
from pd_router.tally import TallyHistogram
from pd_router.timeline import AttemptTimes, Timeline
from support.commands import run_command
from support.router_lab import RouterLab, eventually, router_lab
from support.stub_faults import Faults


async def samples(lab: RouterLab) -> dict[str, float]:
    """By name and labels, those of the model and buckets left out."""
    text = (await lab.http.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if "le" not in labels:
                shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
                found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


async def test_one_request_handed_over() -> None:
    async with router_lab() as lab:
        await lab.generate(stream=True)
        await eventually(lambda: lab.router.num_running == 0)
        found = await samples(lab)
        expected = {
            "vllm:request_success_total{finished_reason=length}": 1,
            "vllm:prompt_tokens_total": 5,
            "vllm:generation_tokens_total": 8,
            "vllm:prefix_cache_queries_total": 5,
            "vllm:prefix_cache_hits_total": 3,
            "vllm:time_to_first_token_seconds_count": 1,
            "vllm:e2e_request_latency_seconds_count": 1,
            "vllm:request_queue_time_seconds_count": 1,
            "vllm:request_prefill_time_seconds_count": 1,
            "vllm:request_decode_time_seconds_count": 1,
            "vllm:request_generation_tokens_sum": 8,
            "vllm:nixl_xfer_time_seconds_count{transport=stub}": 1,
            "vllm:nixl_bytes_transferred_sum{transport=stub}": 5 * 5760,
            "pdrelay_requests_total{end=length}": 1,
            "pdrelay_placements_total{kind=remote,reason=idlest}": 1,
            "pdrelay_handoffs_total{transport=stub}": 1,
            "pdrelay_handoff_bytes_total{transport=stub}": 5 * 5760,
            "pdrelay_retries_total": 0,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
        }
        assert {name: found.get(name) for name in expected} == expected
        gaps = found["vllm:inter_token_latency_seconds_count"]
        assert 1 <= gaps <= 7  # one a message that brought tokens
        assert found["vllm:request_decode_time_seconds_sum"] >= found["vllm:inter_token_latency_seconds_sum"] * 0.999


async def test_attempts_migrations_and_errors() -> None:
    """An attempt after tokens is a migration; what is refused counts by its code, and was never a success."""
    async with router_lab(num_decode=2) as lab:
        lab.prefill[0].faults.prefill.append(Unavailable("as ordered"))
        await lab.generate()
        failure = pb.Failure(code="unavailable", message="as ordered", retryable=True)
        for worker in lab.decode:
            worker.faults.fail_at[4] = failure
        await lab.generate()
        for worker in lab.stubs:
            worker.faults = Faults()
        for worker in lab.prefill:
            worker.faults.prefill.append(InvalidArgument("as ordered"))
        with pytest.raises(InvalidArgument):
            await lab.generate()
        await eventually(lambda: lab.router.num_running == 0)
        found = await samples(lab)
        assert found["vllm:request_success_total{finished_reason=length}"] == 2
        assert found["pdrelay_requests_total{end=rejected}"] == 1
        assert found["pdrelay_request_errors_total{code=invalid_argument}"] == 1
        assert not any(name.startswith("vllm:request_success") and "error" in name for name in found)
        assert 1 <= found["pdrelay_migrations_total"] < found["pdrelay_retries_total"]


async def test_workers_as_they_are_now() -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].loads = {
            "num_blocks_total": 100, "num_blocks_free": 25, "num_quarantined_blocks": 3, "num_expired_leases_total": 2,
            "fetched_bytes_total": 4096, "num_fetches_total": 2, "fetch_us_total": 150, "num_failed_pulls_total": 1,
        }
        link = lab.router._registry.link("decode-0")
        assert link is not None
        await eventually(lambda: link.loads is not None and link.loads.num_quarantined_blocks == 3)
        found = await samples(lab)
        of_worker = "{role=decode,worker=decode-0}"
        expected = {
            "vllm:kv_cache_usage_perc{engine=decode-0}": 0.75,
            "vllm:nixl_num_failed_transfers_total{engine=decode-0}": 1,
            f"pdrelay_quarantined_blocks{of_worker}": 3,
            f"pdrelay_expired_leases_total{of_worker}": 2,
            f"agent_rx_bytes_total{of_worker}": 4096,
            f"agent_rx_requests_num_total{of_worker}": 2,
            f"agent_xfer_time_total{of_worker}": 150,
            "pdrelay_workers{role=decode,state=ready}": 2,
        }
        assert {name: found.get(name) for name in expected} == expected
        gone = lab.decode.pop(0)
        await lab.tell_workers()
        assert not any("decode-0" in name for name in await samples(lab)), "a worker that has gone leaves no series"
        await gone.kill()


async def test_stages_experts_and_memory_of_workers() -> None:
    """What not every report has stays until it is told anew; what is of another shape is left out."""
    async with router_lab(num_decode=2) as lab:
        for worker, busiest in zip(lab.decode, (6, 2), strict=True):
            counts = [[busiest, 1, 1, 0], [2, 2, 2, 2]]
            worker.loads = {
                "stages": [pb.StageTime(stage="experts", seconds=0.5)], "num_watched_steps": 3, "watched_seconds": 0.75,
                "experts": [pb.ExpertTokens(tokens=row) for row in counts],
                "memory": pb.MemoryAudit(weights_bytes=7, available_bytes=9),
            }
        lab.prefill[0].loads = {"experts": [pb.ExpertTokens(tokens=[1, 2])]}
        links = lab.router._registry.links()
        await eventually(lambda: all(link.load.experts for link in links))
        for worker in lab.decode:
            worker.loads = {}
        await eventually(lambda: all(link.loads and not link.loads.experts for link in links[1:]))
        found = await samples(lab)
        assert found["pdrelay_expert_tokens_total{expert=0,layer=0,role=decode}"] == 8
        assert found["pdrelay_expert_tokens_total{expert=1,layer=0,role=prefill}"] == 2
        assert found["pdrelay_expert_max_over_mean{layer=0,role=decode}"] == 8 * 4 / 12
        assert found["pdrelay_expert_max_over_mean{layer=1,role=decode}"] == 1
        assert found["pdrelay_memory_bytes{part=available,role=decode,worker=decode-1}"] == 9
        info = await lab.api.GetServerInfo(api.GetServerInfoRequest())
        memory = {worker.id: worker.memory.weights_bytes for worker in info.workers if worker.HasField("memory")}
        assert memory == {"decode-0": 7, "decode-1": 7}
        text = await asyncio.to_thread(run_command, "memory", "--address", lab.grpc_address, "--json")
        assert [one["memory"] is None for one in text.document["workers"]] == [True, False, False]
        lab.decode[1].loads = {"experts": [pb.ExpertTokens(tokens=[1])]}
        await eventually(lambda: [len(row.tokens) for row in links[2].load.experts] == [1])
        assert (await samples(lab))["pdrelay_expert_tokens_total{expert=0,layer=0,role=decode}"] == 6


def test_a_tally_counts_like_a_histogram() -> None:
    tally = TallyHistogram("seconds", "of something", {"model_name": "m"}, (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        tally.observe(value)
    [family] = tally.collect()
    assert {sample.labels.get("le", sample.name): sample.value for sample in family.samples} == {
        "0.1": 2, "1.0": 3, "+Inf": 4, "seconds_count": 4, "seconds_sum": 7.65,
    }


def test_the_parts_of_a_timeline() -> None:
    timeline = Timeline(begun_s=10.0)
    assert (timeline.first_token_s, timeline.queue_s, timeline.prefill_s, timeline.decode_s) == (None,) * 4
    timeline.attempts.append(
        AttemptTimes(
            number=1, kind="remote", reason="idlest", prefill_worker="p", decode_worker="d", placed_s=12.0,
            num_tokens_before=0,
        )
    )
    assert [timeline.note_tokens(now_s) for now_s in (15.0, 15.5, 16.5)] == [None, 0.5, 1.0]
    assert (timeline.first_token_s, timeline.queue_s, timeline.prefill_s, timeline.decode_s) == (5.0, 2.0, 3.0, 1.5)


def test_reasons_of_placements() -> None:
    def reason(kind: PrefillKind = PrefillKind.REMOTE, *, ready: bool = True, **fields: Any) -> Reason:
        request = PlacementRequest(
            num_tokens=32, num_prefill_blocks=2, num_decode_blocks=3, pinned_prefill=fields.pop("pinned", "")
        )
        snapshot = Snapshot(
            prefill=(WorkerView(worker_id="p", ready=ready),), decode=(), held=fields.pop("held", {})
        )
        return reason_of(
            Placement(
                kind=kind, prefill_worker="p", decode_worker="d", ttft_ms=1.0, cost_ms=1.0, request=request,
                snapshot=snapshot, **fields,
            )
        )

    assert reason() is Reason.IDLEST
    assert reason(held={"p": 1}) is Reason.CACHED
    assert reason(held={"d": 1}) is Reason.IDLEST
    assert reason(prefix=PrefixOffer(worker_id="d", num_blocks=2)) is Reason.FETCHED
    assert reason(pinned="p") is Reason.NAMED
    assert reason(PrefillKind.LOCAL) is Reason.SHORT_REST
    assert reason(PrefillKind.LOCAL, ready=False) is Reason.DEGRADED
