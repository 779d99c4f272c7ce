"""Waiting for a turn: who is cancelled is not placed, in whichever instant that happens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.admission import Arrival
from pd_router.gate import RoomGate
from pd_router.waiting_line import Waiter


class Room:
    """A registry and an admission in one: there is no room at first, and some once `change` is set."""

    def __init__(self, waiter: Waiter) -> None:
        self.line = SimpleNamespace(head=waiter)
        self.change = asyncio.Event()

    def snapshot(self, block_hashes: object) -> None:
        return None

    async def wait_change(self) -> None:
        await self.change.wait()

    def arrive(self, *arguments: Any, may_recover: bool) -> Arrival:
        return Arrival(None)

    def turn(self, *arguments: Any, may_recover: bool) -> str | None:
        return "a place" if self.change.is_set() else None

    def leave(self, waiter: Waiter) -> None:
        self.line.head = None


@pytest.mark.parametrize("num_ticks", range(6))
async def test_who_is_cancelled_as_its_turn_comes_is_not_placed(num_ticks: int) -> None:
    waiter = Waiter()
    room = cast(Any, Room(waiter))
    gate = RoomGate(room, room)
    request = cast(Any, SimpleNamespace(block_hashes=()))
    waiting = asyncio.create_task(gate.place(request, waiter, None, recovery_wait_s=60.0))
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
