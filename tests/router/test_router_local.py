"""Local prefill as the router runs it, over stub workers that compute prompts themselves: who is asked what, and what a
client gets."""

from __future__ import annotations

import asyncio
import json
import logging

import grpc
import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import Gone, PdRelayError, Unavailable
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.stub_faults import Faults
from support.stub_worker import StubWorker
from support.toy_model import toy_generate

ANSWER = toy_generate(PROMPT, 20)
OFFERED = {"computes_prompts": True}


def names(worker: StubWorker) -> list[str]:
    return [name for name, _, _ in worker.calls if name != "Release"]


async def lose_prefill(lab: RouterLab) -> None:
    await lab.prefill[0].kill()
    link = lab.router._registry.link(lab.prefill[0].worker_id)
    assert link is not None
    await eventually(lambda: link.state.value == "lost")


async def check_answer(lab: RouterLab, worker: str) -> None:
    complete = await lab.generate(max_tokens=20, logprobs=1, stream=True)
    assert list(complete.output_ids) == ANSWER
    assert complete.local_prefill == api.LocalPrefill(worker=worker, block_checksums=[3])
    assert not complete.HasField("handoff")
    assert complete.usage.cached_tokens == 4
    assert [one.token_id for one in complete.logprobs] == ANSWER


async def test_no_prefill_left_is_served_by_decode_workers_until_one_returns() -> None:
    async with router_lab(**OFFERED) as lab:
        assert (await lab.generate()).HasField("handoff")
        lab.forget()
        await lose_prefill(lab)
        await check_answer(lab, "decode-0")
        assert names(lab.decode[0]) == ["Reserve", "ComputePrompt"]
        only = await lab.generate(max_tokens=1)
        assert list(only.output_ids) == ANSWER[:1]
        assert only.local_prefill.worker == "decode-0"
        health = await lab.http.get("/health")
        assert health.status_code == 200
        report = await lab.api.Explain(lab.request())
        assert (report.kind, report.prefill_worker, report.decode_worker) == ("local", "decode-0", "decode-0")
        await lab.prefill[0].start()
        link = lab.router._registry.link(lab.prefill[0].worker_id)
        assert link is not None
        await eventually(lambda: link.state.value == "ready")
        assert (await lab.generate()).HasField("handoff")


async def test_no_prefill_left_and_no_degraded_service() -> None:
    """Unavailable at once, and no decode worker is asked for anything."""
    async with router_lab(settings(router={"degraded": "refuse"}), **OFFERED) as lab:
        await lose_prefill(lab)
        for fields in ({}, {"max_tokens": 1}):
            with pytest.raises(Unavailable, match="prefill: no worker is ready"):
                await lab.generate(**fields)
        assert lab.decode[0].calls == []
        assert (await lab.http.get("/health")).status_code == 503


async def test_no_prefill_left_and_decode_workers_that_do_not_offer_it() -> None:
    async with router_lab() as lab:
        await lose_prefill(lab)
        with pytest.raises(Unavailable, match="prefill: no worker is ready"):
            await lab.generate()
        assert lab.decode[0].calls == []


async def test_a_lease_outlives_the_prefill_worker_and_the_prompt_is_computed_there() -> None:
    """At once, although the dead worker's loss may not have been seen: it has failed this request."""
    async with router_lab(num_decode=2, **OFFERED) as lab:
        lab.prefill[0].faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(lab.generate(max_tokens=20))
        await eventually(lambda: any("Pull" in names(worker) for worker in lab.decode))
        [holder] = [worker for worker in lab.decode if "Reserve" in names(worker)]
        await lab.prefill[0].kill()
        complete = await running
        assert list(complete.output_ids) == ANSWER
        assert complete.local_prefill.worker == holder.worker_id
        attempts = [(name, attempt) for name, _, attempt in holder.calls if name != "Release"]
        assert attempts == [("Reserve", 1), ("Pull", 1), ("Reserve", 2), ("ComputePrompt", 2)]


@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_a_prompt_that_its_only_prefill_worker_fails_is_computed_by_a_decode_worker(max_tokens: int) -> None:
    """At the next attempt: one that dies may seem ready until its loss is seen, and would use up the others."""
    async with router_lab(settings(router={"max_attempts": 2}), **OFFERED) as lab:
        lab.prefill[0].faults.prefill = [Unavailable("busy dying")] * 2
        complete = await lab.generate(max_tokens=max_tokens)
        assert list(complete.output_ids) == ANSWER[:max_tokens]
        assert complete.local_prefill.worker == "decode-0"
        assert names(lab.prefill[0]) == ["Prefill"]
        lab.prefill[0].faults.prefill.clear()
        assert (await lab.generate()).HasField("handoff"), "it is there for others"


async def test_a_prefill_worker_that_has_failed_a_request_and_is_back_computes_its_prompt_again() -> None:
    """When its decode worker dies too, much later."""
    async with router_lab(num_decode=2, **OFFERED) as lab:
        prefill = lab.prefill[0]
        prefill.faults.prefill = [Unavailable("busy dying")]
        faults = Faults(stall_at=5)
        for worker in lab.decode:
            worker.faults = faults
        running = asyncio.create_task(lab.generate(max_tokens=20))
        await eventually(lambda: faults.stall_at is None)
        [holder] = [worker for worker in lab.decode if "ComputePrompt" in names(worker)]
        await lose_prefill(lab)
        await prefill.start()
        link = lab.router._registry.link(prefill.worker_id)
        await eventually(lambda: link is not None and link.state.value == "ready")
        lab.forget()
        await holder.kill()
        complete = await running
        assert list(complete.output_ids) == ANSWER
        assert names(prefill) == ["Prefill"]


@pytest.mark.parametrize("index", [0, 1, 7])
async def test_a_decode_worker_that_dies_while_it_serves_alone_is_replaced(index: int) -> None:
    """Before its first token, or later: another one computes prompt and emitted tokens."""
    async with router_lab(num_decode=2, **OFFERED) as lab:
        await lose_prefill(lab)
        faults = Faults(stall_at=index)  # whichever comes first to it stalls; the other one never does
        for worker in lab.decode:
            worker.faults = faults
        stream = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await eventually(lambda: any(worker.arrived["stall"].is_set() for worker in lab.decode))
        [running] = lab.router._dispatcher._known.running()
        await eventually(lambda: len(running.choices[0].journey.stream.tokens) == index)
        [dying] = [worker for worker in lab.decode if worker.arrived["stall"].is_set()]
        [other] = [worker for worker in lab.decode if worker is not dying]
        await dying.kill()
        assert list((await stream).output_ids) == ANSWER
        [reserve] = [request for request in other.requests if isinstance(request, pb.ReserveRequest)]
        assert reserve.num_emitted_tokens == index


@pytest.mark.parametrize("error", [Gone(), Unavailable("busy dying")])
async def test_a_prompt_that_is_not_taken_is_placed_again(error: PdRelayError) -> None:
    async with router_lab(**OFFERED) as lab:
        await lose_prefill(lab)
        lab.decode[0].faults.compute = [error]
        await check_answer(lab, "decode-0")
        assert [a for n, _, a in lab.decode[0].calls if n == "ComputePrompt"] == [1, 2]


async def test_a_decode_worker_that_is_named_computes_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pd_router.request_log")
    async with router_lab(num_decode=2, **OFFERED) as lab:
        wish = api.Placement(prefill_worker="decode-1", decode_worker="decode-1")
        complete = await lab.generate(max_tokens=20, placement=wish)
        assert list(complete.output_ids) == ANSWER
        assert complete.local_prefill.worker == "decode-1"
        assert lab.prefill[0].calls == lab.decode[0].calls == []
        await lab.assert_no_leaks()
    [line] = [json.loads(record.getMessage()) for record in caplog.records if record.name == "pd_router.request_log"]
    assert (line["prefill_worker"], line["decode_worker"]) == ("decode-1", "decode-1")


async def test_a_client_that_goes_away_leaves_nothing() -> None:
    async with router_lab(**OFFERED) as lab:
        await lose_prefill(lab)
        lab.decode[0].faults.stall_at = 3
        call = lab.api.Generate(lab.request(max_tokens=20, stream=True))
        read = asyncio.create_task(_read(call))
        await eventually(lambda: lab.decode[0].faults.stall_at is None)
        call.cancel()
        await asyncio.gather(read, return_exceptions=True)
        await eventually(lambda: not lab.decode[0].leases)


async def _read(call: grpc.aio.UnaryStreamCall[api.GenerateRequest, api.GenerateResponse]) -> None:
    async for _ in call:
        pass
