"""Whose blocks come first in a decode worker: deadlines order sequences, and who has lost its blocks waits its turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.choice_state import ChoiceState
from decode_worker.preemption import Resident, Snapshot, make_plan
from decode_worker.room import RoomKeeper
from decode_worker.scheduler import Place
from pd_engine.priority import SECONDS_A_LEVEL
from support.room_world import HOLDER, Request, World, spec_of


class Watched(RoomKeeper):
    """As if so many sequences were in host memory."""

    num_away = 0

    @property
    def num_preempted(self) -> int:
        return self.num_away


def world(room_class: type[RoomKeeper] = RoomKeeper) -> World:
    return World(
        0, num_blocks=64, max_host_blocks=40, max_batch=16, projected_tokens=8, with_cache=True, room_class=room_class
    )


def request(number: int, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "journey_id": f"{number:032x}", "prompt": [1, 2, 3] * 5, "max_tokens": 20, "speculate": 0, "cancel_round": None,
        "attempt": 1,
    }
    return Request(**(fields | changes))


def test_the_earlier_deadline_comes_first_and_of_none_the_oldest() -> None:
    here = world()
    asked = [
        request(0), request(1, deadline_ms=3_000), request(2, deadline_ms=500_000), request(3, priority=-1),
        request(4, priority=1, deadline_ms=1),
    ]
    records = []
    for each in asked:
        here.core.reserve(spec_of(each))
        record = here.core._book.newest(each.journey_id)
        assert record is not None
        here.room.arrive(record, 0.0)
        records.append(record)
    ordered = sorted(records, key=lambda record: record.place)
    assert [int(record.spec.key.journey_id, 16) for record in ordered] == [3, 1, 2, 0, 4]
    later = request(5, deadline_ms=1)
    here.core.reserve(spec_of(later))
    record = here.core._book.newest(later.journey_id)
    assert record is not None
    assert here.room.arrive(record, SECONDS_A_LEVEL + 1) > records[0].place, "nobody stays behind newcomers for ever"


def test_who_has_time_leaves_for_who_has_none() -> None:
    def resident(name: str, place: Place, lacks: int = 0) -> Resident:
        return Resident(
            name=name, place=place, num_blocks=4, num_freed_blocks=4, num_wanted_blocks=4 + lacks,
            num_quiet_blocks=4 + lacks, may_leave=True,
        )

    patient, pressed = Place(due_s=10.0, arrival=0), Place(due_s=4.0, arrival=1)
    residents = sorted(
        [resident("patient", patient), resident("pressed", pressed, lacks=1)], key=lambda one: one.place
    )
    plan = make_plan(Snapshot(
        num_free_blocks=0, num_coming_blocks=0, num_host_blocks_free=9, residents=residents, away=(), leases=(),
        max_batch=8,
    ))
    assert plan.leave == ["patient"]


@pytest.mark.parametrize("num_away", [0, 1])
def test_one_whose_fetch_broke_gets_no_blocks_before_those_that_wait_to_come_back(num_away: int) -> None:
    here = world(Watched)
    asked = request(0, is_local=True)
    here.core.reserve(spec_of(asked))
    here.core.local.fetcher = cast(Any, SimpleNamespace(start=lambda record, wish: True, stop=lambda record: None))
    here.core.compute_prompt(asked.key, "", HOLDER)
    record = here.core._book.find(asked.key)
    assert record is not None
    assert record.state is ChoiceState.FETCHING
    here.core._blocks.release(record)  # they were in the lease of its fetch, which has ended
    cast(Watched, here.room).num_away = num_away
    here.core.local.fetched(record)
    if num_away:
        assert record.state is ChoiceState.ENDED
        [event] = here.stream.take()
        assert "wait for blocks" in event.failure.message
        assert event.failure.retryable
        assert here.pool.num_free == here.pool.num_blocks
    else:
        assert record.state is ChoiceState.PREFILLING
        assert len(record.block_ids) == record.num_blocks
