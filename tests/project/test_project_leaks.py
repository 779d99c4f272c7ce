"""The check that nothing stays behind: what is about to be closed is no leak, what is referred to is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_engine.cache.arena import Arena
from support import leaks
from support.handoff_prompt import PAGED
from support.leaks import assert_nothing_left


async def stream(arena: Arena) -> AsyncIterator[int]:
    """As of a call that is cut: suspended for good, with the arena in its frame."""
    yield arena.num_blocks


async def cut_stream() -> list[Any]:
    """A cycle with a suspended stream in it, whose arena is closed but for its mapping."""
    arena = Arena(PAGED, 1)
    cycle: list[Any] = [stream(arena)]
    await anext(cycle[0])
    cycle.append(cycle)
    arena.close()
    return cycle


async def test_a_stream_that_only_a_cycle_keeps_is_closed_by_the_loop() -> None:
    async with assert_nothing_left():
        await cut_stream()


async def test_what_somebody_refers_to_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "CLOSING_S", 0.05)
    kept = []
    with pytest.raises(AssertionError, match="pd-relay-arena"):
        async with assert_nothing_left():
            kept.append(await cut_stream())
    await kept[0][0].aclose()
