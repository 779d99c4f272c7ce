"""Requests whose first token would come too late are refused before anybody works on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument, ResourceExhausted
from pd_router.targets import MAX_RETRY_MS, MIN_RETRY_MS, Targets
from support.router_lab import RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate

PROMPT = list(range(100, 200))


@pytest.mark.parametrize(
    ("ttft_ms", "waited_ms", "message", "retry_after_ms"),
    [
        (1_500.0, 0, "after about 1500 ms; the target is 1000 ms", 500),
        (800.0, 600, "after about 1400 ms; the target is 1000 ms", 400),
        (1_001.0, 0, "after about 1001 ms", MIN_RETRY_MS),
        (1e9, 0, "the target is 1000 ms", MAX_RETRY_MS),
    ],
)
def test_what_would_be_late_is_refused_with_a_hint(
    ttft_ms: float, waited_ms: int, message: str, retry_after_ms: int
) -> None:
    targets = Targets(ttft_ms=1_000, begun_s=50.0)
    now_s = 50.0 + waited_ms / 1000
    with pytest.raises(ResourceExhausted, match=message) as caught:
        targets.check_late(targets.late_ms(ttft_ms, now_s))
    assert caught.value.retry_after_ms == retry_after_ms
    targets.check_late(targets.late_ms(999.0 - waited_ms, now_s))


@pytest.fixture
async def lab() -> AsyncIterator[RouterLab]:
    async with router_lab(settings(router={"ttft_target_ms": 5_000}), num_prefill=2, num_blocks=20) as lab:
        yield lab


async def until_measured(lab: RouterLab, tokens_per_s: float) -> None:
    """Both prefill workers have reported this speed."""
    for stub in lab.prefill:
        stub.loads["prefill_tokens_per_s"] = tokens_per_s
    expected_ms = len(PROMPT) * 1000 / tokens_per_s
    async with asyncio.timeout(60):
        while True:
            report = await lab.api.Explain(lab.request(PROMPT))
            if all(c.terms[1].ms == pytest.approx(expected_ms) for c in report.candidates if c.part == "prefill"):
                return


async def test_a_slow_pool_refuses_and_a_fast_one_serves(lab: RouterLab) -> None:
    await until_measured(lab, 10.0)
    with pytest.raises(ResourceExhausted, match=r"after about 1\d{4} ms; the target is 5000 ms") as caught:
        await lab.generate(PROMPT)
    assert 5_000 <= (caught.value.retry_after_ms or 0) <= MAX_RETRY_MS
    assert all(not stub.calls for stub in lab.stubs)
    reply = await lab.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
    await until_measured(lab, 10_000.0)
    assert (await lab.generate(PROMPT)).output_ids


async def test_nothing_is_refused_on_a_speed_that_nobody_has_measured() -> None:
    async with router_lab(settings(router={"ttft_target_ms": 50})) as lab:
        assert (await lab.api.Explain(lab.request(PROMPT))).ttft_ms == 100.0
        assert (await lab.generate(PROMPT)).output_ids


async def test_who_finds_no_room_in_time_is_refused(lab: RouterLab) -> None:
    lab.decode[0].faults.stall_at = 2
    running = asyncio.create_task(lab.generate(PROMPT, max_tokens=100))
    await eventually(lambda: lab.decode[0].arrived["stall"].is_set())
    with pytest.raises(ResourceExhausted, match="no worker has had room within 500 ms") as caught:
        await lab.generate(PROMPT, max_tokens=200, ttft_target_ms=500)
    assert caught.value.retry_after_ms == 500
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await lab.generate(PROMPT, max_tokens=4)).output_ids  # the queue is not held up by the one that left it


async def test_a_request_has_targets_of_its_own(lab: RouterLab) -> None:
    await until_measured(lab, 800.0)
    with pytest.raises(ResourceExhausted, match="the target is 50 ms"):
        await lab.generate(PROMPT, ttft_target_ms=50)
    reply = await lab.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "ttft_target_ms": 50})
    assert reply.status_code == 429
    assert (await lab.generate(PROMPT, ttft_target_ms=60_000)).output_ids


async def test_no_worker_takes_more_than_keep_the_pace() -> None:
    """Three at once where two keep within 28 ms: the third waits until one has ended."""
    async with router_lab(settings(router={"itl_target_ms": 28})) as lab:
        [decode] = lab.decode
        decode.loads |= {"itl_ms": 26.0, "num_running": 1}
        link = lab.router._registry.link("decode-0")
        assert link is not None
        await eventually(lambda: link.load.itl.is_measured)
        decode.loads["num_running"] = 0
        decode.faults.stall_at = 2
        stalled = asyncio.create_task(lab.generate(PROMPT, max_tokens=20))
        await eventually(lambda: decode.arrived["stall"].is_set())
        decode.faults.stall_at = 2
        decode.arrived["stall"].clear()
        second = asyncio.create_task(lab.generate(PROMPT, max_tokens=20))
        await eventually(lambda: link.load.report is not None and link.load.report.num_leases == 2)
        third = asyncio.create_task(lab.generate(PROMPT, max_tokens=4))
        await eventually(lambda: lab.router.num_running == 3)
        with pytest.raises(ResourceExhausted, match="no worker keeps within 20 ms a token"):
            await lab.generate(PROMPT, itl_target_ms=20)  # looked at later than the third
        assert sum(call == "Reserve" for call, _, _ in decode.calls) == 2
        stalled.cancel()
        assert list((await third).output_ids) == toy_generate(PROMPT, 4)
        second.cancel()
        await asyncio.gather(stalled, second, return_exceptions=True)


async def test_of_those_that_wait_the_urgent_and_the_rare_come_first() -> None:
    router = {"max_running_requests": 1, "max_waiting_requests": 4}
    async with router_lab(settings(router=router)) as lab:
        [prefill] = lab.prefill
        prefill.faults.prefill_gate = gate = asyncio.Event()
        asked = [("flood", 0), ("flood", 0), ("flood", 0), ("flood", -1), ("rare", 7)]
        running = []
        for number, (user, priority) in enumerate(asked):
            request = lab.request([number + 1] * 20, user=user, priority=priority)
            running.append(asyncio.create_task(lab.complete(request)))
            await eventually(lambda number=number: lab.router.num_running == number + 1)  # type: ignore[misc]
        guest = asyncio.create_task(lab.complete(lab.request([9] * 20, user="guest")))
        with pytest.raises(ResourceExhausted, match="and 4 may wait"):
            await running[2]  # the least urgent of those with most makes room for the guest
        gate.set()
        await asyncio.gather(*running[:2], *running[3:], guest)
        order = [request.token_ids[0] for request in prefill.requests if request.DESCRIPTOR.name == "PrefillRequest"]
        assert order == [1, 2, 5, 9, 4]


async def test_prompts_wait_at_the_router_while_prefill_workers_have_enough_to_do() -> None:
    async with router_lab(settings(router={"max_prefill_queue_ms": 100})) as lab:
        [prefill] = lab.prefill
        prefill.loads |= {"prefill_tokens_per_s": 1_000.0, "queued_prefill_tokens": 150}
        link = lab.router._registry.link("prefill-0")
        assert link is not None
        await eventually(lambda: link.load.prefill_ms_per_token is not None)
        running = asyncio.create_task(lab.generate(PROMPT, max_tokens=4))
        await eventually(lambda: lab.router._dispatcher.num_waiting == 1)
        assert 'vllm:num_requests_waiting{model_name="demo"} 1.0' in (await lab.http.get("/metrics")).text
        assert not prefill.calls
        prefill.loads["queued_prefill_tokens"] = 50
        assert list((await running).output_ids) == toy_generate(PROMPT, 4)


async def test_what_one_request_may_have_at_most() -> None:
    async with router_lab(settings(router={"max_request_tokens": 150})) as lab:
        with pytest.raises(InvalidArgument, match=r"at most 50 after .* as router\.max_request_tokens has 150"):
            await lab.generate(PROMPT, max_tokens=51)
        assert len((await lab.generate(PROMPT, max_tokens=50)).output_ids) == 50


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user": "x" * 257}, "user has at most 256 characters, got 257"),
        ({"ttft_target_ms": 86_400_001}, "ttft_target_ms must be from 1 to 86400000, got 86400001"),
        ({"itl_target_ms": 2**32 - 1}, "itl_target_ms must be from 1 to 86400000, got 4294967295"),
    ],
)
async def test_targets_and_users_that_cannot_be(lab: RouterLab, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await lab.generate(PROMPT, **fields)
    reply = await lab.http.post("/v1/completions", json={"prompt": PROMPT, **fields})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)
