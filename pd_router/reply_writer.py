"""Writes to streams as soon as there is something to write, without a task that is woken for each message.

What is told in one turn of the event loop, such as a step's tokens of all streams, is written in the next one, message
after message: a write at each token, between the work on the tokens, takes more of gRPC and of the kernel. While a
write is under way, as to a slow client, what comes waits, and is looked for when that write has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

MessageT = TypeVar("MessageT")


class Reply(NamedTuple, Generic[MessageT]):
    """`may_follow`: there may be another one already; False: none before there is news."""

    message: MessageT
    may_follow: bool


class WritingTurn:
    """What many writers have to write, in one turn of the event loop."""

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], None] = {}

    def add(self, write: Callable[[], None]) -> None:
        """It is called once, soon; it must not raise."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due[write] = None

    def _run(self) -> None:
        due, self._due = self._due, {}
        for write in due:
            write()


class ReplyWriter(Generic[MessageT]):
    """Args:
    write: of a message; one is awaited before the next is begun.
    replies: in order, each made when it can be written; None: there is none before there is news.
    """

    def __init__(
        self, write: Callable[[MessageT], Coroutine[Any, Any, None]], replies: Iterator[Reply[MessageT] | None]
    ) -> None:
        self._write = write
        self._replies = replies
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing: Coroutine[Any, Any, None] | None = None  # a write that has not been seen to end
        self._waits_for: asyncio.Future[Any] | None = None  # what it waits for; None: it has not begun
        self._will_go_on = False  # when it has that

    async def run(self) -> None:
        """Until the last reply is written. Raises what making or writing one raises."""
        self.on_news()
        try:
            await self._over
        finally:
            self._give_up()

    def on_news(self) -> None:
        """Writes what can be written now."""
        if self._over.done():
            return
        try:
            while self._has_written():
                reply = next(self._replies, _END)
                if reply is None:
                    return
                if reply is _END:
                    self._over.set_result(None)
                    return
                self._writing = self._write(reply.message)
                self._step()
                if not reply.may_follow:
                    return
        except asyncio.CancelledError:  # of the write: gRPC has given its stream up
            self._over.cancel()
        except Exception as error:  # noqa: BLE001 - whoever runs it is told
            self._over.set_exception(error)

    def _has_written(self) -> bool:
        """All that it began. False: `on_news` is called when more of it has ended."""
        while self._writing is not None:
            waits_for = self._waits_for
            if waits_for is not None and not waits_for.done():
                if not self._will_go_on:
                    self._will_go_on = True
                    waits_for.add_done_callback(self._go_on)
                return False
            self._step()
        return True

    def _step(self) -> None:
        """Does what a task would do with the write."""
        assert self._writing is not None
        try:
            self._waits_for = self._writing.send(None)
        except StopIteration:
            self._writing = self._waits_for = None

    def _go_on(self, waited_for: asyncio.Future[Any]) -> None:
        self._will_go_on = False
        self.on_news()

    def _give_up(self) -> None:
        """Of a write that nobody waits for any more."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if self._waits_for is not None and not self._waits_for.cancel():
            with contextlib.suppress(Exception):
                writing.send(None)
        writing.close()


_END: Any = object()
