"""Fetches that run in a thread: one that was given up is waited for before its memory is used again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kv_transfer.transport import Fetched
from kv_transfer.transports.fetches import Fetches
from kv_transfer.transports.interest import Interest
from pd_engine.errors import DeadlineExceeded, Unavailable
from support.leaks import until

NOTHING = Fetched(generations_before=np.empty(0, np.uint64), generations_after=np.empty(0, np.uint64))


class Stuck:
    """A call that ends only when it is let go."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.interest: Interest | None = None

    def __call__(self, interest: Interest) -> Fetched:
        self.interest = interest
        self.began.set()
        self.may_end.wait()
        raise Unavailable("nobody waits for this fetch any more")


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as made:
        yield made


@pytest.fixture
def stuck(executor: ThreadPoolExecutor) -> Iterator[Stuck]:
    """Let go before the executor ends, also where a test fails."""
    made = Stuck()
    yield made
    made.may_end.set()


async def test_what_has_ended_is_returned_or_raised(executor: ThreadPoolExecutor) -> None:
    fetches = Fetches()
    assert await fetches.run(executor, lambda interest: NOTHING, num_bytes=0, timeout_s=60) is NOTHING

    def fail(interest: Interest) -> Fetched:
        raise Unavailable("the source is gone")

    with pytest.raises(Unavailable, match="the source is gone"):
        await fetches.run(executor, fail, num_bytes=0, timeout_s=60)
    await fetches.quiesce()


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_what_was_given_up_is_waited_for(executor: ThreadPoolExecutor, stuck: Stuck, how: str) -> None:
    fetches = Fetches()
    fetch = asyncio.create_task(
        fetches.run(executor, stuck, num_bytes=7, timeout_s=0.001 if how == "deadline" else 60)
    )
    await asyncio.to_thread(stuck.began.wait)
    if how == "cancelled":
        fetch.cancel()
    with pytest.raises(DeadlineExceeded if how == "deadline" else asyncio.CancelledError):
        await fetch
    assert stuck.interest is not None and not stuck.interest.is_wanted
    quiet = asyncio.create_task(fetches.quiesce())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not quiet.done()
    stuck.may_end.set()
    await quiet


async def test_who_closes_gives_up_what_others_still_want(executor: ThreadPoolExecutor, stuck: Stuck) -> None:
    fetches = Fetches()
    fetch = asyncio.create_task(fetches.run(executor, stuck, num_bytes=7, timeout_s=60))
    await asyncio.to_thread(stuck.began.wait)
    closing = asyncio.create_task(fetches.abandon())
    assert stuck.interest is not None
    interest = stuck.interest
    await until(lambda: interest.is_abandoned)
    assert not closing.done()
    stuck.may_end.set()
    await closing
    with pytest.raises(Unavailable):
        await fetch
