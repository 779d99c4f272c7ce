"""What the gRPC door says of a placement: asked beforehand, or with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.hashing import block_hashes
from pd_router.costs import FETCH_FIXED_MS
from pd_router.pools import DEFAULT_MOVE_MS_PER_TOKEN
from support.router_lab import RouterLab, eventually, router_lab

PROMPT = list(range(100, 100 + 16 * 6 + 3))
HASHES = block_hashes(PROMPT, fingerprint="ab" * 16)


@pytest.fixture
async def lab() -> AsyncIterator[RouterLab]:
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        yield lab


def costs(report: api.PlacementReport) -> dict[tuple[str, str], float]:
    return {(c.part, c.worker_id): sum(term.ms for term in c.terms) for c in report.candidates}


def chosen(report: api.PlacementReport) -> list[tuple[str, str]]:
    return [(c.part, c.worker_id) for c in report.candidates if c.chosen]


async def test_asked_beforehand_nothing_is_run(lab: RouterLab) -> None:
    lab.prefill[1].tell_cache(stored=HASHES[:4])
    await eventually(lambda: bool(lab.router.prefix_index.num_entries))
    report = await lab.api.Explain(lab.request(PROMPT))
    assert (report.kind, report.prefill_worker, report.decode_worker) == ("remote", "prefill-1", "decode-0")
    assert (report.num_prompt_tokens, report.num_hashed_blocks, report.refusal) == (99, 6, "")
    assert chosen(report) == [("prefill", "prefill-1"), ("decode", "decode-0")]
    assert {c.worker_id: c.num_held_blocks for c in report.candidates if c.num_held_blocks} == {"prefill-1": 4}
    cost = costs(report)
    assert cost["prefill", "prefill-1"] == pytest.approx(report.ttft_ms)
    fetched_ms = FETCH_FIXED_MS + 64 * DEFAULT_MOVE_MS_PER_TOKEN  # prefill-0 would take the blocks of prefill-1
    assert cost["prefill", "prefill-1"] == pytest.approx(cost["prefill", "prefill-0"] - fetched_ms)
    assert not report.HasField("break_even_tokens")  # local prefill is not offered
    assert all(not stub.calls for stub in lab.stubs)


async def test_measured_speeds_decide(lab: RouterLab) -> None:
    slow, fast = lab.prefill
    slow.loads["prefill_tokens_per_s"] = 1_000.0
    fast.loads["prefill_tokens_per_s"] = 4_000.0
    lab.decode[0].loads |= {"itl_ms": 40.0, "num_running": 4}
    lab.decode[1].loads |= {"itl_ms": 10.0, "num_running": 4}
    stay_ms = 100 * 10.0 * (16 + 5) / (16 + 4)
    async with asyncio.timeout(60):
        while True:  # until both have reported
            report = await lab.api.Explain(lab.request(PROMPT, max_tokens=100))
            stays = {c.worker_id: t.ms for c in report.candidates for t in c.terms if t.name == "stay"}
            if report.ttft_ms == pytest.approx(99 / 4) and stays["decode-1"] == pytest.approx(stay_ms):
                break
    assert chosen(report) == [("prefill", "prefill-1"), ("decode", "decode-1")]
    assert costs(report)["prefill", "prefill-1"] == pytest.approx(99 / 4)


async def test_who_has_not_been_measured_counts_as_fast_as_the_fastest(lab: RouterLab) -> None:
    lab.prefill[0].loads["prefill_tokens_per_s"] = 4_000.0
    lab.decode[1].loads |= {"itl_ms": 8.0, "num_running": 1, "pull_bytes_per_s": 57.6e6}
    expected = {"compute": 99 / 4, "move": 99 * 5760 / 57.6e3}
    async with asyncio.timeout(60):
        while True:  # until all have reported
            report = await lab.api.Explain(lab.request(PROMPT, max_tokens=10))
            terms = [(c.worker_id, t.name, t.ms) for c in report.candidates for t in c.terms]
            if all(ms == pytest.approx(expected[name]) for _, name, ms in terms if name in expected):
                break
    stays = {worker_id: ms for worker_id, name, ms in terms if name == "stay"}
    assert stays == {"decode-0": pytest.approx(80.0), "decode-1": pytest.approx(80.0 * 18 / 17)}  # it has a sequence


async def test_a_refusal_says_why(lab: RouterLab) -> None:
    request = lab.request(PROMPT)
    request.placement.decode_worker = "decode-9"
    report = await lab.api.Explain(request)
    assert (report.kind, report.refusal) == ("refused", "decode: there is no such worker")
    assert {c.exclusion for c in report.candidates if c.part == "decode"} == {"the request names another worker"}
    assert chosen(report) == []


async def test_the_answer_carries_it_where_it_was_asked_for(lab: RouterLab) -> None:
    request = lab.request(PROMPT)
    assert not (await lab.complete(request)).HasField("placement")
    request.placement.report_placement = True
    complete = await lab.complete(request)
    assert complete.placement.prefill_worker == complete.handoff.prefill_worker
    assert complete.placement.decode_worker == complete.handoff.decode_worker
    assert len(chosen(complete.placement)) == 2


async def test_a_broken_request_is_refused_as_it_would_be(lab: RouterLab) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lab.api.Explain(api.GenerateRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a prompt is needed" in str(caught.value.details())
