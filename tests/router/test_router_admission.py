"""Requests whose first token would come too late are refused before anybody works on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pd_engine.errors import ResourceExhausted
from pd_router.admission import MAX_RETRY_MS, MIN_RETRY_MS, TtftTarget
from pd_router.placement import Placement, PrefillKind
from pd_router.pools import PlacementRequest, Snapshot
from support.router_lab import RouterLab, eventually, router_lab, settings

PROMPT = list(range(100, 200))


def placement(ttft_ms: float) -> Placement:
    return Placement(
        kind=PrefillKind.REMOTE, prefill_worker="p", decode_worker="d", ttft_ms=ttft_ms, cost_ms=ttft_ms,
        request=PlacementRequest(num_tokens=1, num_prefill_blocks=1, num_decode_blocks=1),
        snapshot=Snapshot(prefill=(), decode=()),
    )


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
    target = TtftTarget(target_ms=1_000, begun_s=50.0)
    with pytest.raises(ResourceExhausted, match=message) as caught:
        target.check(placement(ttft_ms), now_s=50.0 + waited_ms / 1000)
    assert caught.value.retry_after_ms == retry_after_ms
    target.check(placement(999.0 - waited_ms), now_s=50.0 + waited_ms / 1000)


@pytest.fixture
async def lab() -> AsyncIterator[RouterLab]:
    async with router_lab(settings(router={"ttft_target_ms": 500}), num_prefill=2, num_blocks=20) as lab:
        yield lab


async def until_measured(lab: RouterLab, tokens_per_s: float) -> None:
    """Both prefill workers have reported this speed."""
    for stub in lab.prefill:
        stub.loads["prefill_tokens_per_s"] = tokens_per_s
    expected_ms = len(PROMPT) * 1000 / tokens_per_s
    async with asyncio.timeout(20):
        while True:
            report = await lab.api.Explain(lab.request(PROMPT))
            if all(c.terms[1].ms == pytest.approx(expected_ms) for c in report.candidates if c.part == "prefill"):
                return


async def test_a_slow_pool_refuses_and_a_fast_one_serves(lab: RouterLab) -> None:
    await until_measured(lab, 100.0)
    with pytest.raises(ResourceExhausted, match=r"after about 10.. ms; the target is 500 ms") as caught:
        await lab.generate(PROMPT)
    assert 450 <= (caught.value.retry_after_ms or 0) <= 600
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
        await lab.generate(PROMPT, max_tokens=200)
    assert caught.value.retry_after_ms == 500
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await lab.generate(PROMPT, max_tokens=4)).output_ids  # the queue is not held up by the one that left it
