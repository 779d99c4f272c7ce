"""Workers that live and fail: nothing is sent there for a while, then one journey finds out."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.errors import InvalidArgument, Unavailable
from pd_router.breaker import FAILURES_IN_A_ROW, MAX_OPEN_S, MIN_OPEN_S, Breaker, BreakerState
from support.router_lab import PROMPT, router_lab, settings
from support.toy_model import toy_generate


def opened(breaker: Breaker, now_s: float = 0.0) -> Breaker:
    for number in range(FAILURES_IN_A_ROW):
        breaker.note_failure(f"f{number}", now_s)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker(random.Random(1))
    for number in range(10):
        breaker.note_failure(f"a{number}", 0.0)
        breaker.note_success(f"b{number}")
    assert breaker.takes_work(0.0)
    opened(breaker)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert MIN_OPEN_S / 2 <= breaker.opens_in_s(0.0) <= MIN_OPEN_S


def test_one_journey_is_let_through_and_closes_it() -> None:
    breaker = opened(Breaker(random.Random(1)))
    assert breaker.state(MIN_OPEN_S) is BreakerState.HALF_OPEN
    breaker.note_sent("probe", MIN_OPEN_S)
    assert not breaker.takes_work(MIN_OPEN_S)
    breaker.note_success("sent before it opened")
    breaker.note_failure("sent before it opened", MIN_OPEN_S)
    assert not breaker.takes_work(MIN_OPEN_S)
    breaker.note_success("probe")
    assert breaker.state(MIN_OPEN_S) is BreakerState.CLOSED


def test_a_probe_that_leaves_makes_way_for_another_one() -> None:
    breaker = opened(Breaker(random.Random(1)))
    breaker.note_sent("probe", MIN_OPEN_S)
    breaker.note_gone("probe")
    assert breaker.takes_work(MIN_OPEN_S)


def test_probes_that_fail_come_ever_later_up_to_a_bound() -> None:
    breaker, now_s, waits = opened(Breaker(random.Random(1))), 0.0, []
    for number in range(12):
        waits.append(breaker.opens_in_s(now_s))
        now_s += waits[-1]
        breaker.note_sent(f"p{number}", now_s)
        breaker.note_failure(f"p{number}", now_s)
    assert waits[0] <= MIN_OPEN_S
    assert all(MAX_OPEN_S / 2 <= wait <= MAX_OPEN_S for wait in waits[7:])


@given(st.lists(st.sampled_from(["send", "success", "failure", "gone", "wait"]), max_size=60), st.integers(0, 9))
def test_it_lets_one_through_again_whatever_happened(story: list[str], seed: int) -> None:
    breaker, now_s, sent, numbers = Breaker(random.Random(seed)), 0.0, [], count()
    for step in story:
        if step == "send" and breaker.takes_work(now_s):
            sent.append(f"j{next(numbers)}")
            breaker.note_sent(sent[-1], now_s)
        elif step == "wait":
            now_s += 1.0
        elif sent and step != "send":
            journey = sent.pop(0)
            if step == "success":
                breaker.note_success(journey)
            elif step == "failure":
                breaker.note_failure(journey, now_s)
            breaker.note_gone(journey)
        assert breaker.opens_in_s(now_s) <= MAX_OPEN_S
    for journey in sent:
        breaker.note_gone(journey)
    assert breaker.takes_work(now_s + MAX_OPEN_S)


async def test_a_worker_that_fails_is_left_alone_until_a_probe_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reports come as ever. Requests fail fast meanwhile; when it works, they are served again by themselves."""
    monkeypatch.setattr("pd_router.breaker.MIN_OPEN_S", 600.0)
    async with router_lab(settings(router={"max_attempts": 1})) as lab:
        [prefill] = lab.prefill
        prefill.faults.prefill = [Unavailable("no memory")] * FAILURES_IN_A_ROW
        for _ in range(FAILURES_IN_A_ROW):
            with pytest.raises(Unavailable, match="no memory"):
                await lab.generate()
        link = lab.router._registry.link("prefill-0")
        assert link is not None
        assert link.breaker.is_open
        assert 'pdrelay_open_breakers{role="prefill",worker="prefill-0"} 1.0' in (await lab.http.get("/metrics")).text
        with pytest.raises(Unavailable, match="prefill: no worker is ready"):
            await lab.generate()
        assert sum(call == "Prefill" for call, _, _ in prefill.calls) == FAILURES_IN_A_ROW
        link.breaker._until_s = 0.0  # its time is over
        link._half_open()
        assert list((await lab.generate()).output_ids) == toy_generate(PROMPT, 8)
        assert not link.breaker.is_open
        answers = await asyncio.gather(*(lab.generate() for _ in range(4)))
        assert all(list(answer.output_ids) == toy_generate(PROMPT, 8) for answer in answers)


async def test_a_stream_waits_for_the_probe() -> None:
    async with router_lab(settings(router={"max_attempts": 8})) as lab:
        lab.decode[0].faults.pull = [Unavailable("cannot pull")] * 5
        assert list((await lab.generate(stream=True)).output_ids) == toy_generate(PROMPT, 8)


async def test_what_is_wrong_with_a_request_is_not_laid_to_the_worker() -> None:
    async with router_lab(settings(router={"max_attempts": 1})) as lab:
        lab.prefill[0].faults.prefill = [InvalidArgument("not this one")] * 5
        for _ in range(5):
            with pytest.raises(InvalidArgument):
                await lab.generate()
        link = lab.router._registry.link("prefill-0")
        assert link is not None
        assert not link.breaker.is_open
