"""The end of a queue of releases."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pd_router.releases import ReleaseQueue


@pytest.mark.parametrize("num_turns", range(5))
async def test_who_is_cancelled_as_the_last_one_is_sent_has_not_closed_it(num_turns: int) -> None:
    """However many turns lie between the two; with `asyncio.wait_for` one case would lose the cancellation."""
    queue = ReleaseQueue("decode-0", cast(Any, None))
    queue._idle.clear()
    closing = asyncio.create_task(queue.close())
    for _ in range(3):
        await asyncio.sleep(0)
    queue._idle.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if not closing.cancel():
        return  # closed before
    await asyncio.wait([closing])
    assert closing.cancelled()
    queue._task.cancel()
    await asyncio.wait([queue._task])
