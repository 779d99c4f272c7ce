"""Requests by the ids that their clients gave them: those that run, and for a while those that have ended. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from pd_engine.errors import AlreadyExists

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestKey:
    """An id means something to its caller only."""

    caller: str
    request_id: str


@dataclass(slots=True)
class _Entry(Generic[T]):
    payload: bytes
    value: T
    end_s: float | None = None  # when it is forgotten; None while it runs
    cost: int = 0


class KnownRequests(Generic[T]):
    """Args:
    keep_s: how long an ended one is kept.
    max_cost: of all ended ones together; the oldest ends go first.
    """

    def __init__(self, *, keep_s: float, max_cost: int) -> None:
        self._keep_s = keep_s
        self._max_cost = max_cost
        self._entries: dict[RequestKey, _Entry[T]] = {}
        self._ended: OrderedDict[RequestKey, None] = OrderedDict()  # in order of their ends
        self._cost = 0

    def running(self) -> list[T]:
        """Those that have not ended."""
        return [entry.value for entry in self._entries.values() if entry.end_s is None]

    def get(self, key: RequestKey, now_s: float) -> T | None:
        self._drop_old(now_s)
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def find(self, key: RequestKey, payload: bytes, now_s: float) -> T | None:
        """The request of that id and payload, running or ended; None if the id is new.

        Raises:
            AlreadyExists: the id stands for another payload.
        """
        self._drop_old(now_s)
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.payload != payload:
            raise AlreadyExists(f"a request with id {key.request_id!r} and another content is known here")
        return entry.value

    def add(self, key: RequestKey, payload: bytes, value: T) -> None:
        """One that runs from now on; its id is new."""
        assert key not in self._entries, key
        self._entries[key] = _Entry(payload, value)

    def forget(self, key: RequestKey, value: T) -> None:
        """It has ended and is not worth keeping: the id is free again. Another one's value is left alone."""
        entry = self._entries.get(key)
        if entry is not None and entry.value is value:
            self._remove(key)

    def keep(self, key: RequestKey, value: T, *, cost: int, now_s: float) -> None:
        """It has ended, and may be asked for again."""
        entry = self._entries.get(key)
        if entry is None or entry.value is not value:
            return
        entry.end_s, entry.cost = now_s + self._keep_s, cost
        self._ended[key] = None
        self._cost += cost
        self._drop_old(now_s)

    def _drop_old(self, now_s: float) -> None:
        while self._ended:
            oldest = next(iter(self._ended))
            end_s = self._entries[oldest].end_s
            assert end_s is not None, oldest
            if end_s > now_s and self._cost <= self._max_cost:
                return
            self._remove(oldest)

    def _remove(self, key: RequestKey) -> None:
        self._cost -= self._entries.pop(key).cost
        self._ended.pop(key, None)
