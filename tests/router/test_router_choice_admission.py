"""Choices of one request are let in or refused together: none is refused once another one has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import ResourceExhausted
from support.router_lab import RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate

NUM_SEATS = 3


def crowded_lab(num_places: int) -> AbstractAsyncContextManager[RouterLab]:
    return router_lab(settings(router={"max_running_requests": NUM_SEATS, "max_waiting_requests": num_places}))


@pytest.fixture
async def lab() -> AsyncIterator[RouterLab]:
    async with crowded_lab(num_places=2) as lab:
        yield lab


async def started(lab: RouterLab, first_token: int, *, num_choices: int = 1, user: str = "") -> asyncio.Task[set[int]]:
    """A request that runs or waits."""
    num_before = lab.router.num_running
    task = asyncio.create_task(choices_of(lab, lab.request([first_token] * 5, n=num_choices, user=user, max_tokens=4)))
    await eventually(lambda: lab.router.num_running == num_before + num_choices)
    return task


async def choices_of(lab: RouterLab, request: api.GenerateRequest) -> set[int]:
    """Those that have ended well, with the right tokens."""
    found = set()
    async for response in lab.stream(request):
        assert list(response.complete.output_ids) == toy_generate(list(request.tokenized.input_ids), 4)
        found.add(response.complete.choice)
    return found


def asked_for(lab: RouterLab, first_token: int) -> int:
    """Choices of that request that workers have heard of."""
    return sum(request.token_ids[0] == first_token for stub in lab.stubs for request in stub.requests
               if request.DESCRIPTOR.name == "ReserveRequest")


async def test_choices_wait_beyond_a_full_line_once_one_has_begun(lab: RouterLab) -> None:
    gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
    others = [await started(lab, 1), await started(lab, 2)]
    request = await started(lab, 3, num_choices=3)  # one has a seat, two have the places
    await eventually(lambda: asked_for(lab, 3) == 1)
    with pytest.raises(ResourceExhausted, match="3 requests are running, 2 wait"):
        await choices_of(lab, lab.request([4] * 5, max_tokens=4))
    gate.set()
    assert await request == {0, 1, 2}
    assert [await other for other in others] == [{0}, {0}]


async def test_a_line_of_no_places_holds_the_choices_of_what_has_begun() -> None:
    async with crowded_lab(num_places=0) as lab:
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        other = await started(lab, 1)
        request = await started(lab, 2, num_choices=3)
        await eventually(lambda: asked_for(lab, 2) == 2)
        assert lab.router._dispatcher.num_waiting == 1
        gate.set()
        assert (await request, await other) == ({0, 1, 2}, {0})


async def test_where_one_finds_no_place_none_is_begun(lab: RouterLab) -> None:
    gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
    running = [await started(lab, number) for number in range(1, 1 + NUM_SEATS)]
    with pytest.raises(ResourceExhausted, match="3 requests are running, 2 wait"):
        await choices_of(lab, lab.request([9] * 5, n=3, max_tokens=4))
    await eventually(lambda: lab.router.num_running == NUM_SEATS)
    waiting = [await started(lab, number) for number in (7, 8)]
    gate.set()
    assert [await task for task in (*running, *waiting)] == [{0}] * 5
    assert asked_for(lab, 9) == 0


async def test_who_has_to_go_goes_with_all_its_choices() -> None:
    async with crowded_lab(num_places=3) as lab:
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        running = [await started(lab, number, user="flood") for number in range(1, 1 + NUM_SEATS)]
        head = await started(lab, 7, user="flood")
        pair = await started(lab, 8, num_choices=2, user="flood")
        guest = asyncio.create_task(choices_of(lab, lab.request([9] * 5, user="guest", max_tokens=4)))
        with pytest.raises(ResourceExhausted, match="3 requests are running"):
            await pair
        await eventually(lambda: lab.router.num_running == NUM_SEATS + 2)
        gate.set()
        assert [await task for task in (*running, head, guest)] == [{0}] * 5
        assert asked_for(lab, 8) == 0


async def test_targets_hold_until_one_has_begun() -> None:
    """The second choice waits for longer than the target, and is served all the same."""
    config = settings(router={"ttft_target_ms": 300, "max_running_requests": 2})
    async with router_lab(config) as lab:
        other_gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        other = await started(lab, 1)
        request = await started(lab, 2, num_choices=2)
        await eventually(lambda: asked_for(lab, 2) == 1)
        with pytest.raises(ResourceExhausted, match="no worker has had room within 300 ms"):
            await choices_of(lab, lab.request([3] * 5, max_tokens=4))  # it came later than those
        other_gate.set()
        assert (await request, await other) == ({0, 1}, {0})
