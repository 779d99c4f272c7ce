"""Checksums what the compute thread has finished, in a thread of its own, and passes it on to the event loop.

The compute thread only puts (key, component, number of valid tokens) into a queue. Everything of one handoff keeps
its order: a closing can never overtake the pieces before it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kv_transfer.geometry import announceable_slots, final_slots, piece_starts
from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import PIECE_RECORD, Closing, Records
from kv_transfer.transport import Checksums
from pd_engine.cache.arena import Arena
from pd_engine.errors import Internal, PdRelayError

log = logging.getLogger(__name__)


class Progress:
    """How far one handoff has been announced. Used by the publishing thread alone."""

    def __init__(
        self, arena: Arena, block_ids: tuple[int, ...], generations: tuple[int, ...], num_tokens: int,
        num_held_blocks: int,
    ) -> None:
        self._arena = arena
        self._ids_B = np.array(block_ids, dtype=np.int64)
        self._generations_B = np.array(generations, dtype=np.uint64)
        self.final_CB = final_slots(arena.layout, num_tokens, num_held_blocks)
        self._num_tokens = num_tokens
        self._announced_CB = np.zeros_like(self.final_CB)

    @property
    def is_complete(self) -> bool:
        return bool((self._announced_CB == self.final_CB).all())

    def advance(self, component: int, num_valid_tokens: int, checksums: Checksums | None) -> Records:
        """The pieces of a component that have become final, announced from now on."""
        layout, final_B = self._arena.layout, self.final_CB[component]
        allowed_B = announceable_slots(layout, component, num_valid_tokens, final_B, self._num_tokens)
        new_N = np.flatnonzero(allowed_B > self._announced_CB[component])
        records = np.zeros(len(new_N), dtype=PIECE_RECORD)
        records["component"] = component
        records["block"] = new_N
        records["block_id"] = self._ids_B[new_N]
        records["num_valid"] = allowed_B[new_N]
        records["generation"] = self._generations_B[new_N]
        if len(new_N):
            self._arena.expose(component, self._ids_B[new_N], self._generations_B[new_N])
        if checksums is not None and len(new_N):
            records["checksum"] = checksums(
                np.frombuffer(self._arena.buffer, dtype=np.uint8),
                piece_starts(layout, self._arena.num_blocks, np.full_like(new_N, component), self._ids_B[new_N]),
                allowed_B[new_N] * layout.components[component].slot_bytes,
            )
        self._announced_CB[component, new_N] = allowed_B[new_N]
        return records


@dataclass(frozen=True, slots=True)
class _Begin:
    key: JourneyKey
    progress: Progress


@dataclass(frozen=True, slots=True)
class _Publish:
    key: JourneyKey
    component: int
    num_valid_tokens: int


@dataclass(frozen=True, slots=True)
class _Finish:
    key: JourneyKey
    closing: Closing


@dataclass(frozen=True, slots=True)
class _Forget:
    key: JourneyKey


Command = _Begin | _Publish | _Finish | _Forget


class Publisher:
    """The publishing thread.

    Args:
        checksums: None turns checksums off.
        on_records, on_closing, on_error: called in the publishing thread.
    """

    def __init__(
        self, checksums: Checksums | None, *, on_records: Callable[[JourneyKey, Records], None],
        on_closing: Callable[[JourneyKey, Closing], None], on_error: Callable[[JourneyKey, PdRelayError], None],
    ) -> None:
        self._checksums = checksums
        self._on_records = on_records
        self._on_closing = on_closing
        self._on_error = on_error
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._progress: dict[JourneyKey, Progress] = {}
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when everything that was put in before has been passed on."""
        self._commands.put(None)
        self._thread.join()

    def begin(self, key: JourneyKey, progress: Progress) -> None:
        self.put(_Begin(key, progress))

    def publish(self, key: JourneyKey, component: int, num_valid_tokens: int) -> None:
        self.put(_Publish(key, component, num_valid_tokens))

    def finish(self, key: JourneyKey, closing: Closing) -> None:
        self.put(_Finish(key, closing))

    def forget(self, key: JourneyKey) -> None:
        """Nothing more of this handoff is to be passed on."""
        self.put(_Forget(key))

    def put(self, command: Command) -> None:
        """It is done after all that were put in before."""
        self._commands.put(command)

    def do(self, command: Command) -> None:
        """In the publishing thread."""
        try:
            self._do(command)
        except Exception as error:  # the thread serves all handoffs: this one fails, the others go on
            log.exception("publishing %s failed", command.key)
            self._on_error(command.key, Internal(f"publishing failed: {type(error).__name__}"))

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            self.do(command)

    def _do(self, command: Command) -> None:
        if isinstance(command, _Begin):
            self._progress[command.key] = command.progress
            return
        progress = self._progress.get(command.key)
        if progress is None:
            return
        match command:
            case _Publish():
                records = progress.advance(command.component, command.num_valid_tokens, self._checksums)
                if len(records):
                    self._on_records(command.key, records)
            case _Finish():
                is_ended = command.closing.finish_reason is not None
                assert is_ended or progress.is_complete, f"{command.key} is finished, but not all of it is published"
                del self._progress[command.key]
                self._on_closing(command.key, command.closing)
            case _Forget():
                del self._progress[command.key]
