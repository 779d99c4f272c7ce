"""The production state machines of both sides, their pools and real manifests, under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from support.handoff_machine import HandoffMachine
from support.handoff_prompt import ALL_KINDS, PAGED
from support.handoff_sides import Parts

QUICK = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None,
)
LONG = settings(QUICK, max_examples=150)


class PagedMachine(HandoffMachine):
    layout = PAGED


class AllKindsMachine(HandoffMachine):
    layout = ALL_KINDS


class WithoutChecksumsMachine(HandoffMachine):
    """Generations alone must do, as long as nothing is damaged on the way."""

    parts = Parts(checksums=None)
    never = frozenset({"damage"})


MACHINES = [PagedMachine, AllKindsMachine, WithoutChecksumsMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_events(machine: type[HandoffMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.parametrize(("machine", "count", "seed"), [(WithoutChecksumsMachine, 59, 17875)])
def test_orders_that_once_failed(machine: type[HandoffMachine], count: int, seed: int) -> None:
    """A destination dies while it pulls a prefix."""
    run = machine()
    run.start()
    run.things_happen(count=count, seed=seed)
    run.teardown()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_events_at_length(machine: type[HandoffMachine]) -> None:
    """Far more than 10,000 steps: 150 runs of up to 40 rules, most of which are dozens of steps."""
    run_state_machine_as_test(machine, settings=LONG)
