"""What a prefix cache has stored and removed, numbered, so that a reader can go on where it left off. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

MAX_BACKLOG = 65_536  # events


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheChanges:
    """What is to be done to a copy of the set of stored hashes, so that it is the set after event `sequence`.

    Attributes:
        snapshot: `stored` is the whole set; whatever the copy held before is void.
        stored, removed: disjoint.
    """

    sequence: int
    snapshot: bool
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class CacheLog:
    """The set of stored hashes, and its latest changes: event 1 is the first one of the worker's life.

    Args:
        max_backlog: events that are kept; a reader who is further behind gets a snapshot.
    """

    def __init__(self, max_backlog: int = MAX_BACKLOG) -> None:
        assert max_backlog >= 1, max_backlog
        self.sequence = 0  # of the last event
        self._hashes: dict[bytes, None] = {}
        self._backlog: deque[tuple[bytes, bool]] = deque(maxlen=max_backlog)  # (hash, stored or removed)
        self._listeners: list[Callable[[], None]] = []

    @property
    def hashes(self) -> Collection[bytes]:
        """What is stored now."""
        return self._hashes.keys()

    def stored(self, block_hash: bytes) -> None:
        assert block_hash not in self._hashes, block_hash.hex()
        self._hashes[block_hash] = None
        self._append(block_hash, True)

    def removed(self, block_hash: bytes) -> None:
        del self._hashes[block_hash]
        self._append(block_hash, False)

    def changes_after(self, sequence: int | None) -> CacheChanges | None:
        """What a reader that knows everything up to event `sequence` has missed, or None if that is nothing.

        Who knows nothing gets a snapshot, as does who names an event that is too long ago, or that never was.
        """
        if sequence == self.sequence:
            return None
        num_missed = 0 if sequence is None else self.sequence - sequence
        if not 0 < num_missed <= len(self._backlog):
            return CacheChanges(sequence=self.sequence, snapshot=True, stored=tuple(self._hashes), removed=())
        missed = list(self._backlog)[len(self._backlog) - num_missed :]
        last = dict(missed)  # of several changes of one hash the last one counts
        return CacheChanges(
            sequence=self.sequence, snapshot=False,
            stored=tuple(block_hash for block_hash, is_stored in last.items() if is_stored),
            removed=tuple(block_hash for block_hash, is_stored in last.items() if not is_stored),
        )

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls it after every event, until `stop_listening`."""
        self._listeners.append(listener)

    def stop_listening(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)

    def _append(self, block_hash: bytes, is_stored: bool) -> None:
        self.sequence += 1
        self._backlog.append((block_hash, is_stored))
        for listener in self._listeners:
            listener()
