"""Replies are written as soon as there is news: in order, each once, one at a time, and no sooner than they can be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pd_engine.errors import Unavailable
from pd_router.reply_writer import Reply, ReplyWriter, WritingTurn

TIMEOUT_S = 60.0  # of a wait for what must happen


class Wire:
    """Where it is written to: each write takes `num_waits` waits, which end when the test says so."""

    def __init__(self, num_waits: int = 1) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.closed: list[str] = []
        self.waits: list[asyncio.Future[None]] = []
        self._num_waits = num_waits

    async def write(self, message: str) -> None:
        self.begun.append(message)
        try:
            for _ in range(self._num_waits):
                self.waits.append(asyncio.get_running_loop().create_future())
                await self.waits[-1]
        except BaseException:
            self.closed.append(message)
            raise
        self.ended.append(message)


class News:
    """Letters that are to be told; those that are there together go into one message."""

    def __init__(self, *, may_follow: bool = False) -> None:
        self.letters = ""
        self.is_over = False
        self.error: Exception | None = None
        self._may_follow = may_follow

    def replies(self) -> Iterator[Reply[str] | None]:
        while True:
            if self.error is not None:
                raise self.error
            letters, self.letters = self.letters, ""
            if letters:
                yield Reply(letters, self._may_follow or self.is_over)
            elif self.is_over:
                return
            else:
                yield None


def told(news: News, writer: ReplyWriter[str], letters: str) -> None:
    news.letters += letters
    writer.on_news()


@pytest.mark.parametrize("may_follow", [False, True])
@pytest.mark.parametrize("num_waits", [1, 3])
async def test_what_comes_during_a_write_goes_into_the_next_one(may_follow: bool, num_waits: int) -> None:
    wire, news = Wire(num_waits), News(may_follow=may_follow)
    writer = ReplyWriter(wire.write, news.replies())
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    assert wire.begun == []
    told(news, writer, "a")
    assert wire.begun == ["a"]  # at once
    for letter in "bcd":
        told(news, writer, letter)
    assert wire.begun == ["a"]
    news.letters += "e"  # not told yet: found all the same
    while wire.begun == ["a"]:
        wire.waits[-1].set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert wire.begun == ["a", "bcde"]
    assert wire.ended == ["a"]
    news.is_over = True
    writer.on_news()
    while not running.done():
        if not wire.waits[-1].done():
            wire.waits[-1].set_result(None)
        await asyncio.sleep(0)
    await running
    assert wire.begun == wire.ended == ["a", "bcde"]


async def test_what_is_told_in_one_turn_is_written_in_the_next() -> None:
    wire, turn, letters = Wire(), WritingTurn(), [News(), News()]
    writers = [ReplyWriter(wire.write, news.replies()) for news in letters]
    running = [asyncio.create_task(writer.run()) for writer in writers]
    await asyncio.sleep(0)
    for letter in "abc":
        for news, writer in zip(letters, writers, strict=True):
            news.letters += letter
            turn.add(writer.on_news)
    assert wire.begun == []
    await asyncio.sleep(0)
    assert wire.begun == ["abc", "abc"]
    for task in running:
        task.cancel()
    turn.add(writers[0].on_news)
    await asyncio.gather(*running, return_exceptions=True)
    assert all(task.cancelled() for task in running)
    assert wire.begun == ["abc", "abc"]


async def test_nothing_runs_between_a_write_and_the_next_news() -> None:
    wire, news = Wire(), News()
    writer = ReplyWriter(wire.write, news.replies())
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    for count, letter in enumerate("abc", start=1):
        told(news, writer, letter)
        assert len(wire.begun) == count
        wire.waits[-1].set_result(None)
        await asyncio.sleep(0)
        assert len(wire.ended) == count - 1  # it is seen with the next one
    news.is_over = True
    writer.on_news()
    await running
    assert wire.ended == ["a", "b", "c"]


async def test_writes_that_wait_for_nothing() -> None:
    wire, news = Wire(num_waits=0), News()
    writer = ReplyWriter(wire.write, news.replies())
    news.letters = "a"
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    told(news, writer, "b")
    news.is_over = True
    told(news, writer, "c")
    await running
    assert wire.ended == ["a", "b", "c"]


async def test_what_goes_wrong_is_raised_where_it_runs() -> None:
    """Not where the news is told: that is another one's business."""
    wire, news = Wire(), News()
    writer = ReplyWriter(wire.write, news.replies())
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    told(news, writer, "a")
    wire.waits[-1].set_exception(ConnectionError("gone"))
    told(news, writer, "b")
    with pytest.raises(ConnectionError, match="gone"):
        await running
    told(news, writer, "c")
    assert wire.begun == ["a"]

    news = News()
    writer = ReplyWriter(wire.write, news.replies())
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    news.error = Unavailable("no more")
    told(news, writer, "a")
    with pytest.raises(Unavailable, match="no more"):
        await running


async def test_a_write_that_is_cancelled_ends_its_writer_and_no_other_one_of_the_turn() -> None:
    wires, letters, turn = [Wire(), Wire()], [News(), News()], WritingTurn()
    writers = [ReplyWriter(wire.write, news.replies()) for wire, news in zip(wires, letters, strict=True)]
    running = [asyncio.create_task(writer.run()) for writer in writers]
    await asyncio.sleep(0)
    for news, writer in zip(letters, writers, strict=True):
        told(news, writer, "a")
    wires[0].waits[-1].cancel()
    wires[1].waits[-1].set_result(None)
    for news, writer in zip(letters, writers, strict=True):
        news.letters += "b"
        turn.add(writer.on_news)
    await asyncio.wait(running, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    assert running[0].cancelled()
    assert (wires[0].closed, wires[1].begun) == (["a"], ["a", "b"])
    running[1].cancel()
    await asyncio.gather(running[1], return_exceptions=True)


async def test_who_is_cancelled_leaves_no_write_behind() -> None:
    wire, news = Wire(), News()
    writer = ReplyWriter(wire.write, news.replies())
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    told(news, writer, "a")
    told(news, writer, "b")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert wire.closed == ["a"]
    assert wire.waits[-1].cancelled()
    await asyncio.sleep(0)
    told(news, writer, "c")
    assert wire.begun == ["a"]


async def test_a_write_that_has_ended_is_ended_when_who_ran_it_is_cancelled() -> None:
    wire, news = Wire(), News()
    writer = ReplyWriter(wire.write, news.replies())
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    told(news, writer, "a")
    wire.waits[-1].set_result(None)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert wire.ended == ["a"]
