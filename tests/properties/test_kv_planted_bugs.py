"""The state machine finds the bugs that it is there to find: each is planted, and must be caught."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support import planted_handoff_bugs as bugs
from support.handoff_machine import HandoffMachine
from support.handoff_sides import Parts

SEARCH = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    phases=[Phase.generate], derandomize=True, report_multiple_bugs=False,
)

PLANTED = {
    "epoch check skipped": Parts(source_book=bugs.EpochNotChecked),
    "early free": Parts(source_book=bugs.FreedAtClosing),
    "renewal forgotten": Parts(source_book=bugs.RenewalForgotten),
    "hold is renewed": Parts(source_book=bugs.HoldIsRenewed),
    "hold ends before its reader": Parts(source_book=bugs.HoldEndsBeforeItsReader),
    "pins of holds forgotten": Parts(holder=bugs.PinsOfHoldsForgotten),
    "holds without bound": Parts(holder=bugs.HoldsWithoutBound),
    "prefix lease is renewed": Parts(destination_book=bugs.PrefixLeaseIsRenewed),
    "pins never expire": Parts(source_book=bugs.SourceNeverExpires),
    "acknowledge before verify": Parts(destination_book=bugs.CommittedBeforeVerified),
    "no quarantine": Parts(destination_book=bugs.NoQuarantine),
    "quarantine ends with the first fetch": Parts(destination_book=bugs.QuarantineEndsWithTheFirstFetch),
    "no tombstones": Parts(destination_book=bugs.NoTombstones),
    "lease never expires": Parts(destination_book=bugs.LeaseNeverExpires),
    "budget ignored": Parts(destination_book=bugs.BudgetIgnored),
    "takeover keeps what is in flight": Parts(destination_book=bugs.TakeoverKeepsWhatIsInFlight),
    "generation read once": Parts(verify=bugs.generation_read_once, checksums=None),
    "checksum not compared": Parts(verify=bugs.checksum_not_compared),
    "nothing verified": Parts(verify=bugs.nothing_verified),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    class Planted(HandoffMachine):
        parts = PLANTED[name]
        never = frozenset({"damage"}) if PLANTED[name].checksums is None else frozenset()

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Planted, settings=SEARCH)
