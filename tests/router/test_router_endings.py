"""How requests end before they are done: aborted, out of time, gone with their client or with the router."""

from __future__ import annotations

import asyncio

import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import (
    DeadlineExceeded,
    Unavailable,
)
from support.router_lab import PROMPT, eventually, router_lab, settings
from support.toy_model import toy_generate


async def test_abort_ends_it_with_what_there_is() -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.stall_at = 3
        running = asyncio.create_task(lab.generate(request_id="x", max_tokens=50, stream=True))
        await lab.decode[0].arrived["stall"].wait()
        reply = await lab.api.Abort(api.AbortRequest(request_ids=["x", "unknown"]))
        assert list(reply.unknown_request_ids) == ["unknown"]
        complete = await running
        assert complete.finish_reason == "cancelled"
        assert list(complete.output_ids) == toy_generate(PROMPT, 50)[: len(complete.output_ids)]


@pytest.mark.parametrize("when", ["prefilling", "decoding"])
async def test_a_router_that_stops_fails_what_it_cannot_finish(when: str) -> None:
    """It is not "cancelled": the client would take half an answer for one that it had ended itself."""
    async with router_lab() as lab:
        if when == "prefilling":
            lab.prefill[0].faults.prefill_gate = asyncio.Event()
        else:
            lab.decode[0].faults.stall_at = 2
        body = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
        over_grpc = asyncio.create_task(lab.generate(max_tokens=50, stream=True))
        over_http = asyncio.create_task(lab.http.post("/v1/completions", json=body))
        stub, arrived = (lab.prefill[0], "Prefill") if when == "prefilling" else (lab.decode[0], "stall")
        await stub.arrived[arrived].wait()
        await eventually(lambda: lab.router.num_running == 2)
        await lab.router.stop(drain_s=0)
        with pytest.raises(Unavailable, match="this router is stopping"):
            await over_grpc
        assert "this router is stopping" in (await over_http).text


@pytest.mark.parametrize("when", ["prefilling", "decoding"])
async def test_a_client_that_goes_away_releases_everything(when: str) -> None:
    async with router_lab() as lab:
        if when == "prefilling":
            lab.prefill[0].faults.prefill_gate = asyncio.Event()
        else:
            lab.decode[0].faults.stall_at = 2
        call = lab.api.Generate(lab.request(max_tokens=50, stream=True))
        waiting = asyncio.create_task(call.read())
        stub, arrived = (lab.prefill[0], "Prefill") if when == "prefilling" else (lab.decode[0], "stall")
        await stub.arrived[arrived].wait()
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await lab.assert_no_leaks()
        lab.prefill[0].faults.prefill_gate = None
        assert list((await lab.generate()).output_ids) == toy_generate(PROMPT, 8)


async def test_the_request_deadline_ends_it() -> None:
    async with router_lab(settings(router={"request_timeout_ms": 1_000})) as lab:
        lab.decode[0].faults.stall_at = 2
        with pytest.raises(DeadlineExceeded, match="did not end within 1 s"):
            await lab.generate(max_tokens=50)


async def test_without_workers_it_is_unavailable_at_once() -> None:
    async with router_lab(num_prefill=1, num_decode=0) as lab:
        with pytest.raises(Unavailable, match="decode: no worker is left") as caught:
            await lab.generate()
        assert caught.value.retry_after_ms == 1_000
        assert lab.prefill[0].calls == []
