"""When a dead process is started again, and what may become of it."""

from __future__ import annotations

import pytest

from pd_engine.settings import load_settings
from pd_ops.cluster.members import Member, MemberState
from pd_ops.cluster.plan import Role, plan_cluster
from pd_ops.cluster.restarts import STABLE_S, RestartPacer, RestartPolicy

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=10.0)


def member() -> Member:
    settings = load_settings(None)
    [plan] = [worker for worker in plan_cluster(settings).workers if worker.role is Role.DECODE]
    return Member(plan=plan, settings=settings, pacer=RestartPacer(POLICY))


def test_ends_in_a_row_are_paced() -> None:
    pacer = RestartPacer(POLICY)
    delays = []
    for now_s in range(0, 80, 10):
        pacer.note_serving(now_s)
        delays.append(pacer.next_delay_s(now_s + 5))
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    pacer.note_serving(100.0)
    assert pacer.next_delay_s(100.0 + STABLE_S) == 0.0
    assert pacer.next_delay_s(100.0 + STABLE_S) == 1.0  # its start failed


def test_a_thousand_failed_starts_are_paced_too() -> None:
    pacer = RestartPacer(POLICY)
    assert [pacer.next_delay_s(float(number)) for number in range(1_000)][-1] == 10.0


def test_nobody_waits_for_what_cannot_start() -> None:
    one = member()
    one.move(MemberState.SERVING)
    one.pacer.note_serving(0.0)
    assert one.is_expected
    one.move(MemberState.WAITING)
    one.pacer.next_delay_s(1.0)
    assert one.is_expected
    for _ in range(2):
        assert one.is_expected
        one.move(MemberState.STARTING)
        one.move(MemberState.WAITING)
        one.pacer.next_delay_s(2.0)
    assert not one.is_expected
    one.move(MemberState.STARTING)
    one.pacer.note_serving(3.0)
    one.move(MemberState.SERVING)
    assert one.is_expected


def test_who_drains_gets_nothing_new_and_does_not_come_back() -> None:
    one = member()
    one.move(MemberState.SERVING)
    one.move(MemberState.DRAINING)
    assert not one.is_expected
    with pytest.raises(AssertionError, match="decode-0: draining -> serving"):
        one.move(MemberState.SERVING)
