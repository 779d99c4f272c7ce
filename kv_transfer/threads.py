"""Work for a thread, which begins or never does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from pd_engine.errors import Unavailable

T = TypeVar("T")


def run_in_thread(executor: Executor | None, call: Callable[[], T]) -> asyncio.Future[T]:
    """As the event loop's `run_in_executor`, but a call for which this raises never runs. A pool that cannot start a
    thread raises, keeps the call, and runs it with the next one that comes: a fetch would write to blocks that are
    somebody else's by then.

    Raises:
        Unavailable: this process may have no more threads.
    """
    result: Future[T] = Future()

    def run() -> None:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(call())
            except BaseException as error:  # noqa: BLE001 - whoever awaits it is told
                # without this frame, which refers to the result: no cycle keeps what the error refers to
                result.set_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))

    try:
        asyncio.get_running_loop().run_in_executor(executor, run)
    except (RuntimeError, MemoryError) as error:
        if result.cancel():  # else a thread of the pool was free just then, and has begun
            raise Unavailable(f"there is no thread for a transfer: {error}") from None
    return asyncio.wrap_future(result)
