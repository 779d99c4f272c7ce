"""Which choices a decode worker has. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from decode_worker.choice_state import ChoiceRecord
from kv_transfer.journey import JourneyKey
from pd_engine.service.tombstones import Tombstones


class ChoiceBook:
    """The newest attempt of each journey until its end, and every choice whose blocks are its own until they are given
    back: an ended one may be in compute for a step, beside the attempt that follows it."""

    def __init__(self) -> None:
        self._newest: dict[str, ChoiceRecord] = {}  # by journey
        self._begun: dict[str, ChoiceRecord] = {}  # by name, oldest first
        self._tombstones = Tombstones()

    @property
    def is_empty(self) -> bool:
        return not self._newest and not self._begun

    @property
    def begun(self) -> Mapping[str, ChoiceRecord]:
        """Those whose blocks are their own, by name, oldest first."""
        return self._begun

    def open(self) -> list[ChoiceRecord]:
        """Those that have not ended."""
        return list(self._newest.values())

    def newest(self, journey_id: str) -> ChoiceRecord | None:
        """The journey's choice that has not ended, whatever its attempt."""
        return self._newest.get(journey_id)

    def find(self, key: JourneyKey) -> ChoiceRecord | None:
        """The choice of exactly this attempt that has not ended."""
        record = self._newest.get(key.journey_id)
        return record if record is not None and record.spec.key == key else None

    def is_gone(self, key: JourneyKey) -> bool:
        """Released up to this attempt, or it has ended, or a higher one was seen."""
        newest = self._newest.get(key.journey_id)
        is_old = newest is not None and newest.spec.key.attempt > key.attempt
        return is_old or self._tombstones.is_gone(key.journey_id, key.attempt)

    def add(self, record: ChoiceRecord) -> None:
        """A lease was granted; the earlier attempt of the journey has ended."""
        self._newest[record.spec.key.journey_id] = record

    def begin(self, record: ChoiceRecord) -> None:
        """Its blocks are its own."""
        self._begun[record.name] = record

    def end(self, record: ChoiceRecord, now_s: float) -> None:
        """Its attempt is gone from here."""
        key = record.spec.key
        if self._newest.get(key.journey_id) is record:
            del self._newest[key.journey_id]
        self.bury(key.journey_id, key.attempt, now_s)

    def gave_back(self, record: ChoiceRecord) -> None:
        """Nobody uses its blocks any more."""
        self._begun.pop(record.name, None)

    def bury(self, journey_id: str, up_to_attempt: int, now_s: float) -> None:
        self._tombstones.bury(journey_id, up_to_attempt, now_s)

    def tick(self, now_s: float) -> None:
        self._tombstones.tick(now_s)
