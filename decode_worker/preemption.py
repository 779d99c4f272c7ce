"""Who gets the next blocks, who leaves when there are none, and who comes back. Pure: a snapshot in, a plan out.

Sequences are served in order of their places: the most urgent first, of one priority the one that is due first. One
that finds no free block makes the last ones behind it leave; the first is never asked to, so it always goes on. One
with nobody behind it waits where it is.

Nobody comes back, and no new lease is granted, before all that run could go on for `QUIET_STEPS` steps; one that has
come back stays for as many tokens. So every move pays for itself with tokens, and nothing goes in circles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decode_worker.scheduler import Place

LOOKAHEAD_STEPS = 4  # a sequence has blocks for so many steps: those under way while a block is found, and a move
QUIET_STEPS = 16     # at least as many tokens


def num_slots_ahead(num_tokens: int, num_steps: int, *, num_drafts: int, num_slots: int) -> int:
    """Slots that the next steps of a sequence write to at most: of each token but the last, and of drafts.

    Args:
        num_tokens: now, the last one not computed yet.
        num_drafts: a step.
        num_slots: at its greatest length.
    """
    return min(num_slots, num_tokens - 1 + num_steps * (1 + num_drafts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """A sequence with its latents in the arena, or on its way back there.

    Attributes:
        num_blocks: it has.
        num_freed_blocks: of these, that would be free if it let go of them.
        num_wanted_blocks, num_quiet_blocks: for the next `LOOKAHEAD_STEPS`, `QUIET_STEPS` steps.
        may_leave: False while it comes back, and until it has generated `QUIET_STEPS` tokens from then on.
    """

    name: str
    place: Place
    num_blocks: int
    num_freed_blocks: int
    num_wanted_blocks: int
    num_quiet_blocks: int
    may_leave: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Away:
    """A sequence in host memory.

    Attributes:
        num_shared_blocks: that others hold and it would share: they take no free ones.
        num_wanted_blocks, num_quiet_blocks: in all, as of a `Resident`.
    """

    name: str
    place: Place
    num_shared_blocks: int
    num_wanted_blocks: int
    num_quiet_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A worker's room.

    Attributes:
        num_free_blocks: that can be allocated now, those among them that only a prefix cache has a use for.
        num_coming_blocks: that will be free when a copy, a step or a transfer under way has ended.
        num_host_blocks_free: of the host tier.
        residents, away: in order of their places.
        leases: (name, blocks that would be free) of those not handed over yet, the last ones first.
        max_batch: sequences in one step at most.
    """

    num_free_blocks: int
    num_coming_blocks: int
    num_host_blocks_free: int
    residents: Sequence[Resident]
    away: Sequence[Away]
    leases: Sequence[tuple[str, int]]
    max_batch: int


@dataclass(kw_only=True, slots=True)
class Plan:
    """What is to be done, by name.

    Attributes:
        grants: so many more blocks.
        leave: to host memory.
        recompute: to be given up, as the host tier has no room for them; their routers resume them.
        revoke: leases to be given up, as the first sequence finds room nowhere else.
        come_back: with so many blocks in all.
    """

    grants: dict[str, int] = field(default_factory=dict)
    leave: list[str] = field(default_factory=list)
    recompute: list[str] = field(default_factory=list)
    revoke: list[str] = field(default_factory=list)
    come_back: dict[str, int] = field(default_factory=dict)


def make_plan(snapshot: Snapshot) -> Plan:
    plan = Plan()
    if _supply(snapshot, plan):
        _bring_back(snapshot, plan)
    return plan


def num_quiet_blocks_missing(residents: Sequence[Resident], grants: Mapping[str, int]) -> int:
    """Blocks that all of them together lack for `QUIET_STEPS` steps."""
    return sum(max(0, each.num_quiet_blocks - each.num_blocks - grants.get(each.name, 0)) for each in residents)


def _supply(snapshot: Snapshot, plan: Plan) -> bool:
    """Grants blocks, in order; False if somebody has to wait for them. Those behind it wait with it."""
    num_free = snapshot.num_free_blocks
    for place, resident in enumerate(snapshot.residents):
        missing = resident.num_wanted_blocks - resident.num_blocks
        if missing <= 0:
            continue
        if missing > num_free:
            num_short = missing - num_free - snapshot.num_coming_blocks
            num_short = _make_leave(snapshot, plan, snapshot.residents[place + 1 :], num_short)
            if place == 0:
                _revoke(snapshot, plan, num_short)
            return False
        plan.grants[resident.name] = missing
        num_free -= missing
    return True


def _make_leave(snapshot: Snapshot, plan: Plan, candidates: Sequence[Resident], num_short: int) -> int:
    """The last ones leave, until so many blocks will be free. Returns how many are lacking still."""
    num_host_free = snapshot.num_host_blocks_free
    for victim in reversed(candidates):
        if num_short <= 0:
            break
        if not victim.may_leave:
            continue
        if victim.num_blocks <= num_host_free:
            plan.leave.append(victim.name)
            num_host_free -= victim.num_blocks
        else:
            plan.recompute.append(victim.name)
        num_short -= victim.num_freed_blocks
    return num_short


def _revoke(snapshot: Snapshot, plan: Plan, num_short: int) -> None:
    for name, num_blocks in snapshot.leases:
        if num_short <= 0:
            return
        plan.revoke.append(name)
        num_short -= num_blocks


def _bring_back(snapshot: Snapshot, plan: Plan) -> None:
    """In order, while there is room for it, for all that run, and in the batch."""
    num_spare = snapshot.num_free_blocks - sum(plan.grants.values())
    num_spare -= num_quiet_blocks_missing(snapshot.residents, plan.grants)
    for away in snapshot.away:
        num_before = sum(resident.place < away.place for resident in snapshot.residents) + len(plan.come_back)
        num_blocks = away.num_quiet_blocks
        num_short = num_blocks - away.num_shared_blocks - num_spare
        if num_short > 0 and not snapshot.residents and not plan.come_back:
            # Nobody runs: rather a few steps than none.
            num_short -= num_blocks - away.num_wanted_blocks
            num_blocks = away.num_wanted_blocks
            _revoke(snapshot, plan, num_short - snapshot.num_coming_blocks)
        if num_short > 0 or num_before >= snapshot.max_batch:
            return
        plan.come_back[away.name] = num_blocks
        num_spare -= away.num_quiet_blocks - away.num_shared_blocks
