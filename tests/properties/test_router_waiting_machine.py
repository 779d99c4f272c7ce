"""The waiting line, whatever comes and goes: each has one outcome, the bounds hold, and nobody waits for ever."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_router.choice_group import ChoiceGroup
from pd_router.waiting_line import NUM_TURNS_A_ROUND, Waiter, WaitingLine

MAX_WAITING = 6
TENANTS = st.sampled_from("abc") | st.uuids().map(str)  # a few that come again, and ever new ones


class WaitingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(max_waiting=MAX_WAITING)
        self.waiting: list[Waiter] = []
        self.outcomes: dict[Waiter, str] = {}
        self.num_passed: dict[Waiter, int] = {}  # turns of others since it came, those let in before aside
        self.num_before: dict[Waiter, int] = {}

    def end(self, waiter: Waiter, outcome: str) -> None:
        assert waiter not in self.outcomes, (waiter, outcome, self.outcomes[waiter])
        self.outcomes[waiter] = outcome
        if waiter in self.waiting:
            self.waiting.remove(waiter)

    @rule(
        tenant=TENANTS, priority=st.integers(-2, 2), num_tokens=st.integers(1, 5_000),
        is_again=st.integers(0, 5).map(lambda roll: roll == 0), group=st.integers(0, 9),
    )
    def join(self, tenant: str, priority: int, num_tokens: int, is_again: bool, group: int) -> None:
        """`group`: of the last ones, that it is another choice of; of none if there are not so many."""
        groups = list(dict.fromkeys(other.group for other in self.num_before))
        own = groups[-group] if 0 < group <= len(groups) else ChoiceGroup()
        waiter = Waiter(tenant=tenant, priority=priority, num_tokens=num_tokens, is_again=is_again, group=own)
        head = self.line.head
        self.num_before[waiter] = sum(not other.is_again for other in self.waiting)
        self.num_passed[waiter] = 0
        displaced = self.line.join(waiter)
        if displaced is not waiter:
            self.waiting.append(waiter)
        if displaced is not None:
            assert displaced is not head
            assert not displaced.is_again
            assert not displaced.group.has_begun
            self.end(displaced, "refused")

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        head = self.line.head
        assert head is not None
        assert head in self.waiting
        self.line.serve(head)
        self.end(head, "served")
        head.group.begin()
        if not head.is_again:
            for other in self.waiting:
                self.num_passed[other] += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.line.leave(waiter)
        self.line.leave(waiter)  # as often as anybody says so
        self.end(waiter, "left")

    @invariant()
    def the_line_is_who_waits(self) -> None:
        assert len(self.line) == len(self.waiting)
        assert sum(not (one.is_again or one.group.has_begun) for one in self.waiting) <= MAX_WAITING
        assert (self.line.head is None) == (not self.waiting)
        assert self.line.num_tokens == sum(waiter.num_tokens for waiter in self.waiting if not waiter.is_again)

    @invariant()
    def nobody_is_passed_by_for_ever(self) -> None:
        for waiter in self.waiting:
            most = NUM_TURNS_A_ROUND * (self.num_before[waiter] + 1)
            assert waiter.is_again or self.num_passed[waiter] <= most, waiter

    @invariant()
    def who_waits_no_more_is_forgotten(self) -> None:
        """Unless it has had more than those that wait now."""
        waiting = {waiter.tenant for waiter in self.waiting if not waiter.is_again}
        tenants = self.line._tenants
        lowest = min((tenants[name].mark for name in waiting), default=math.inf)
        assert all(name in waiting or tenant.mark > lowest for name, tenant in tenants.items())

    def teardown(self) -> None:
        while (head := self.line.head) is not None:
            self.line.serve(head)
            self.end(head, "served")
        assert set(self.outcomes) == set(self.num_before)
        assert not self.waiting


ARRIVALS = st.lists(st.tuples(TENANTS, st.integers(-3, 3), st.integers(1, 5_000)), max_size=3)


@given(
    before=ARRIVALS, ours=st.tuples(TENANTS, st.integers(-3, 3), st.integers(1, 5_000)),
    after=st.lists(ARRIVALS, min_size=4, max_size=4),
)
def test_whoever_comes_later_one_has_its_turn_in_time(
    before: list[tuple[str, int, int]], ours: tuple[str, int, int], after: list[list[tuple[str, int, int]]]
) -> None:
    line = WaitingLine(max_waiting=1_000)
    for tenant, priority, num_tokens in before:
        line.join(Waiter(tenant=tenant, priority=priority, num_tokens=num_tokens))
    tenant, priority, num_tokens = ours
    waiter = Waiter(tenant=tenant, priority=priority, num_tokens=num_tokens)
    line.join(waiter)
    for turn in range(NUM_TURNS_A_ROUND * (len(before) + 1)):
        for tenant, priority, num_tokens in after[turn % len(after)]:
            line.join(Waiter(tenant=tenant, priority=priority, num_tokens=num_tokens))
        head = line.head
        assert head is not None
        line.serve(head)
        if head is waiter:
            return
    raise AssertionError("it still waits")


TestWaitingMachine = WaitingMachine.TestCase
TestWaitingMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
