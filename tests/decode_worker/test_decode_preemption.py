"""Who gets blocks, who leaves and who comes back: one plan at a time."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.preemption import Away, Resident, Snapshot, make_plan, num_slots_ahead
from decode_worker.scheduler import Place


def resident(arrival: int, num_blocks: int = 4, *, lacks: int = 0, quiet: int = 0, **changes: Any) -> Resident:
    fields: dict[str, Any] = {
        "name": f"r{arrival}", "place": Place(arrival=arrival), "num_blocks": num_blocks,
        "num_freed_blocks": num_blocks,
        "num_wanted_blocks": num_blocks + lacks, "num_quiet_blocks": num_blocks + max(lacks, quiet), "may_leave": True,
    }
    return Resident(**(fields | changes))


def away(arrival: int, wanted: int = 4, quiet: int = 6, shared: int = 0) -> Away:
    return Away(
        name=f"a{arrival}", place=Place(arrival=arrival), num_shared_blocks=shared, num_wanted_blocks=wanted,
        num_quiet_blocks=quiet,
    )


def snapshot(*residents: Resident, free: int = 0, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "num_free_blocks": free, "num_coming_blocks": 0, "num_host_blocks_free": 100, "residents": residents,
        "away": (), "leases": (), "max_batch": 8,
    }
    return Snapshot(**(fields | changes))


def test_blocks_go_to_the_oldest_first() -> None:
    plan = make_plan(snapshot(resident(1, lacks=1), resident(2, lacks=2), resident(3, lacks=1), free=2))
    assert plan.grants == {"r1": 1}, "the third does not pass the second by"
    assert plan.leave == ["r3"], "which waits for the newest to leave"


def test_the_newest_leave_until_there_is_room() -> None:
    plan = make_plan(snapshot(resident(1, lacks=5), resident(2), resident(3), resident(4)))
    assert plan.leave == ["r4", "r3"]


def ranked(name: str, priority: int, arrival: int, **changes: Any) -> Resident:
    return resident(arrival, name=name, place=Place(priority=priority, arrival=arrival), **changes)


def test_the_newest_of_the_least_urgent_leave_first() -> None:
    """Residents come in order of their places."""
    residents = [ranked("urgent", -1, 9, lacks=9), ranked("old", 0, 1), ranked("new", 0, 5), ranked("low", 3, 0)]
    assert [each.place for each in residents] == sorted(each.place for each in residents)
    assert make_plan(snapshot(*residents)).leave == ["low", "new", "old"]
    assert make_plan(snapshot(ranked("urgent", -1, 9, lacks=8), *residents[1:])).leave == ["low", "new"]


def test_the_most_urgent_comes_back_first() -> None:
    urgent = Away(
        name="urgent", place=Place(priority=-1, arrival=9), num_shared_blocks=0, num_wanted_blocks=4, num_quiet_blocks=6
    )
    plan = make_plan(snapshot(resident(1), resident(2), free=7, away=[urgent, away(0)], max_batch=2))
    assert plan.come_back == {"urgent": 6}, "before those that run"


def test_who_has_just_come_back_stays() -> None:
    plan = make_plan(snapshot(resident(1, lacks=1), resident(2), resident(3, may_leave=False)))
    assert plan.leave == ["r2"]


def test_blocks_that_are_on_their_way_are_waited_for() -> None:
    plan = make_plan(snapshot(resident(1, lacks=2), resident(2), num_coming_blocks=2))
    assert plan == make_plan(snapshot())


def test_the_newest_waits_where_it_is() -> None:
    plan = make_plan(snapshot(resident(1), resident(2, lacks=1), leases=[("l", 9)]))
    assert plan == make_plan(snapshot())


def test_what_the_host_tier_cannot_hold_is_computed_again() -> None:
    plan = make_plan(snapshot(resident(1, lacks=6), resident(2), resident(3), num_host_blocks_free=5))
    assert (plan.leave, plan.recompute) == (["r3"], ["r2"])


def test_leases_end_for_the_oldest_alone_and_as_the_last_resort() -> None:
    leases = [("newest", 3), ("older", 9)]
    plan = make_plan(snapshot(resident(1, lacks=6), resident(2), leases=leases))
    assert (plan.leave, plan.revoke) == (["r2"], ["newest"])
    assert make_plan(snapshot(resident(1, lacks=6), leases=leases)).revoke == ["newest", "older"]


def test_the_oldest_comes_back_first_when_all_have_room_for_a_while() -> None:
    waiting = [away(5), away(6)]
    assert make_plan(snapshot(resident(1, quiet=2), free=7, away=waiting)).come_back == {}
    assert make_plan(snapshot(resident(1, quiet=2), free=8, away=waiting)).come_back == {"a5": 6}
    assert make_plan(snapshot(resident(1, quiet=2), free=14, away=waiting)).come_back == {"a5": 6, "a6": 6}


def test_blocks_that_are_cached_and_held_take_no_room() -> None:
    assert make_plan(snapshot(resident(1), free=3, away=[away(5, shared=3)])).come_back == {"a5": 6}


def test_a_small_one_does_not_pass_the_oldest_by() -> None:
    assert make_plan(snapshot(resident(1), free=5, away=[away(5), away(6, wanted=1, quiet=1)])).come_back == {}


def test_nobody_comes_back_while_one_waits_for_blocks() -> None:
    plan = make_plan(snapshot(resident(1), resident(2, lacks=9), free=8, away=[away(5)]))
    assert plan.come_back == {}


def test_nobody_comes_back_without_a_place_in_the_batch() -> None:
    older = [resident(1), resident(2)]
    assert make_plan(snapshot(*older, free=99, away=[away(5)], max_batch=2)).come_back == {}
    assert make_plan(snapshot(*older, free=99, away=[away(0)], max_batch=2)).come_back == {"a0": 6}, "before them"


def test_where_nobody_runs_a_few_steps_are_enough() -> None:
    assert make_plan(snapshot(free=4, away=[away(5), away(6)])).come_back == {"a5": 4}
    plan = make_plan(snapshot(free=3, away=[away(5)], leases=[("l", 1), ("m", 1)]))
    assert (plan.come_back, plan.revoke) == ({}, ["l"])


def test_slots_ahead_end_where_the_sequence_ends() -> None:
    assert num_slots_ahead(10, 1, num_drafts=2, num_slots=100) == 12, "the last token's and two drafts'"
    assert num_slots_ahead(10, 4, num_drafts=0, num_slots=100) == 13
    assert num_slots_ahead(10, 4, num_drafts=2, num_slots=15) == 15


RESIDENTS = st.lists(
    st.builds(
        lambda blocks, freed, lacks, quiet, may_leave: {
            "num_blocks": blocks, "num_freed_blocks": min(freed, blocks), "num_wanted_blocks": blocks + lacks,
            "num_quiet_blocks": blocks + lacks + quiet, "may_leave": may_leave,
        },
        st.integers(1, 9), st.integers(0, 9), st.integers(0, 3), st.integers(0, 3), st.booleans(),
    ),
    max_size=7,
)


@settings(deadline=None)
@given(RESIDENTS, st.integers(0, 20), st.integers(0, 6), st.integers(0, 20), st.integers(0, 3), st.integers(0, 3))
def test_no_plan_gives_what_is_not_there(
    fields: list[dict[str, Any]], free: int, coming: int, host: int, num_away: int, num_leases: int
) -> None:
    residents = [resident(2 * number, **each) for number, each in enumerate(fields)]
    by_name = {each.name: each for each in residents}
    waiting = [away(2 * number + 1) for number in range(num_away)]
    plan = make_plan(snapshot(
        *residents, free=free, num_coming_blocks=coming, num_host_blocks_free=host, away=waiting,
        leases=[(f"l{number}", 2) for number in range(num_leases)],
    ))
    assert sum(plan.grants.values()) + sum(plan.come_back.values()) <= free
    assert sum(by_name[name].num_blocks for name in plan.leave) <= host
    lacking = [each for each in residents if each.num_wanted_blocks > each.num_blocks]
    unserved = [each for each in lacking if each.name not in plan.grants]
    assert list(plan.grants) == [each.name for each in lacking[: len(plan.grants)]]
    gone = [by_name[name] for name in [*plan.leave, *plan.recompute]]
    assert all(each.may_leave and each.place > unserved[0].place for each in gone)
    assert list(plan.come_back) == [each.name for each in waiting[: len(plan.come_back)]]
    assert not (plan.come_back and (gone or unserved))
    if unserved and unserved[0] is residents[0] and all(each.may_leave for each in residents) and num_leases == 3:
        found = free + coming + sum(each.num_freed_blocks for each in gone) + 2 * len(plan.revoke)
        assert found >= unserved[0].num_wanted_blocks - unserved[0].num_blocks, "room is found for the oldest"
