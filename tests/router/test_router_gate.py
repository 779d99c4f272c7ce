"""Waiting for a turn: who is cancelled is not placed, in whichever instant that happens; who waits keeps up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.admission import Admission, Arrival
from pd_router.gate import RoomGate
from pd_router.pools import PlacementRequest
from pd_router.waiting_line import Waiter
from support.router_lab import PROMPT, eventually, router_lab
from support.toy_model import toy_generate


class Room:
    """A registry and an admission in one: there is no room at first, and some once `change` is set.

    may_recover: at each look, whether it might be for a worker that is waited.
    """

    def __init__(self, waiter: Waiter) -> None:
        self.line = SimpleNamespace(head=waiter)
        self.change = asyncio.Event()
        self.may_recover: list[bool] = []

    def snapshot(self, block_hashes: object) -> None:
        return None

    async def wait_change(self) -> None:
        await self.change.wait()

    def arrive(self, *arguments: Any, may_recover: bool) -> Arrival:
        self.may_recover.append(may_recover)
        return Arrival(None)

    def turn(self, *arguments: Any, may_recover: bool) -> str | None:
        self.may_recover.append(may_recover)
        return "a place" if self.change.is_set() else None

    def leave(self, waiter: Waiter) -> None:
        self.line.head = None


@pytest.mark.parametrize("num_ticks", range(6))
async def test_who_is_cancelled_as_its_turn_comes_is_not_placed(num_ticks: int) -> None:
    waiter = Waiter()
    room = cast(Any, Room(waiter))
    gate = RoomGate(room, room)
    request = cast(Any, SimpleNamespace(block_hashes=()))
    waiting = asyncio.create_task(gate.place(lambda: request, waiter, None, recovery_wait_s=60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    room.change.set()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        assert await waiting == "a place"


async def test_a_choice_in_line_waits_for_a_lost_worker_once_another_one_has_begun() -> None:
    """It would be refused, and the answer that has begun with it."""
    waiter = Waiter()
    room = cast(Any, Room(waiter))
    request = cast(Any, SimpleNamespace(block_hashes=()))
    waiting = asyncio.create_task(RoomGate(room, room).place(lambda: request, waiter, None, recovery_wait_s=60.0))
    await eventually(lambda: len(room.may_recover) == 2)
    waiter.group.begin()
    room.change.set()
    assert await waiting == "a place"
    assert room.may_recover == [False, False, True]


async def test_who_waits_for_a_worker_knows_what_has_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has gone with the decode worker's life, and the prefill worker that failed it is back."""
    asked: list[PlacementRequest] = []
    turn = Admission.turn

    def noted(self: Admission, waiter: Waiter, wanted: PlacementRequest, *others: Any, **named: Any) -> Any:
        asked.append(wanted)
        return turn(self, waiter, wanted, *others, **named)

    monkeypatch.setattr(Admission, "turn", noted)
    async with router_lab() as lab:
        [prefill], [decode] = lab.prefill, lab.decode
        prefill.faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(lab.generate())
        await decode.arrived["Pull"].wait()
        await prefill.kill()
        await eventually(lambda: bool(asked))
        assert (asked[0].dying, asked[0].preferred_decode) == ({prefill.worker_id}, decode.worker_id)
        assert asked[0].num_own_blocks == asked[0].num_decode_blocks
        await decode.kill()
        await decode.start()
        prefill.faults.prefill_gate.set()
        await prefill.start()
        assert list((await running).output_ids) == toy_generate(PROMPT, 8)
        assert (asked[-1].dying, asked[-1].preferred_decode, asked[-1].num_own_blocks) == (frozenset(), "", 0)
