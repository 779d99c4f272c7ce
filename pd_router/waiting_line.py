"""Who comes next of those that wait for their turn: fair between tenants, by priority within one. Pure.

- Journeys that were let in once and are placed again come first, in order of arrival.
- Otherwise tenants share turns by tokens (start-time fair queueing): each has a mark that rises by the tokens of what
  it was given, and the lowest mark is next. A tenant that comes newly, or comes back, starts at the lowest mark of
  those that wait, so that nobody saves up turns.
- Of one tenant's, the lowest priority value is next, of equals the first that came.
- Every fourth turn goes to whoever has waited longest. So nobody waits for more than `NUM_TURNS_A_ROUND` turns for each
  that came before it, whatever comes after, and a tenant that always waits has three quarters of its share at least.
- Who is next stays next until it is served or goes away, or one that was let in before comes: what needs much room is
  not passed by while room is made.
- A full line turns away whole requests: a choice whose request has begun finds a place in it, and keeps it.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from pd_router.choice_group import ChoiceGroup

NUM_TURNS_A_ROUND = 4  # the last of which is for the one that has waited longest


@dataclass(eq=False, kw_only=True, slots=True)
class Waiter:
    """One journey that waits.

    Attributes:
        tenant: whose it is.
        priority: lower comes earlier.
        num_tokens: what its turn costs its tenant.
        is_again: it was let in before.
        group: it and the other choices of its request.
        number: in order of arrival; the line gives it.
    """

    tenant: str = ""
    priority: int = 0
    num_tokens: int = 1
    is_again: bool = False
    group: ChoiceGroup = field(default_factory=ChoiceGroup)
    number: int = 0

    def rank(self) -> tuple[int, int]:
        """Among its tenant's."""
        return self.priority, self.number


@dataclass(eq=False, slots=True)
class _Tenant:
    """`mark`: the tokens it was given, on the line's common scale. `waiting`: in order of rank."""

    mark: float
    waiting: list[Waiter] = field(default_factory=list)


class WaitingLine:
    """`max_waiting`: those that were let in before are not counted; choices of what has begun may exceed it."""

    def __init__(self, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._again: list[Waiter] = []
        self._tenants: dict[str, _Tenant] = {}  # with somebody waiting, or a mark above the lowest
        self._num_waiting = 0
        self._num_arrivals = 0
        self._num_turns = 0
        self._head: Waiter | None = None

    def __len__(self) -> int:
        return self._num_waiting + len(self._again)

    @property
    def num_again(self) -> int:
        """Of those that wait, let in before."""
        return len(self._again)

    @property
    def num_tokens(self) -> int:
        """Of all others that wait."""
        return sum(waiter.num_tokens for tenant in self._tenants.values() for waiter in tenant.waiting)

    @property
    def head(self) -> Waiter | None:
        """Whose turn it is; None: nobody waits."""
        if self._head is None or (self._again and not self._head.is_again):
            self._head = self._next()
        return self._head

    def join(self, waiter: Waiter) -> Waiter | None:
        """It waits from now on. In a full line somebody has to go instead, who is returned: the newest of the least
        urgent of the tenant with most waiting; the newcomer itself if its tenant has as many. None: there is room."""
        self._num_arrivals += 1
        waiter.number = self._num_arrivals
        if waiter.is_again:
            self._again.append(waiter)
            return None
        is_full = self._num_waiting >= self._max_waiting and not waiter.group.has_begun
        displaced = self._displaced_by(waiter) if is_full else None
        if displaced is waiter:
            return waiter
        if displaced is not None:
            self.leave(displaced)
        self._add(waiter)
        return displaced

    def leave(self, waiter: Waiter) -> None:
        """It goes away without a turn; nothing if it does not wait."""
        if waiter.is_again:
            if waiter in self._again:
                self._again.remove(waiter)
        else:
            tenant = self._tenants.get(waiter.tenant)
            if tenant is None or waiter not in tenant.waiting:
                return
            tenant.waiting.remove(waiter)
            self._num_waiting -= 1
            self._forget_idle()
        if waiter is self._head:
            self._head = None

    def serve(self, waiter: Waiter) -> None:
        """The head has its turn."""
        assert waiter is self.head, (waiter, self.head)
        if not waiter.is_again:
            self._tenants[waiter.tenant].mark += waiter.num_tokens
            self._num_turns += 1
        self.leave(waiter)

    def num_tokens_ahead(self, waiter: Waiter) -> int:
        """What comes before a waiter that is about to join, at the most that each tenant has there by then, without
        those that were let in before: they have no work of the line's to wait for."""
        ours = self._tenants.get(waiter.tenant)
        before = [] if ours is None else [other for other in ours.waiting if other.priority <= waiter.priority]
        num_ours = sum(other.num_tokens for other in before)
        mark = self._lowest_mark() if ours is None else ours.mark
        reach = mark + num_ours + waiter.num_tokens
        num_others = 0
        for name, tenant in self._tenants.items():
            if name != waiter.tenant:
                num_others += min(sum(other.num_tokens for other in tenant.waiting), max(0, round(reach - tenant.mark)))
        return num_ours + num_others

    def _add(self, waiter: Waiter) -> None:
        tenant = self._tenants.setdefault(waiter.tenant, _Tenant(self._lowest_mark()))
        insort(tenant.waiting, waiter, key=Waiter.rank)
        self._num_waiting += 1

    def _displaced_by(self, waiter: Waiter) -> Waiter:
        """Of a full line."""
        head_group = None if self._head is None else self._head.group
        candidates = {
            name: [one for one in tenant.waiting if one.group is not head_group and not one.group.has_begun]
            for name, tenant in self._tenants.items()
        }
        candidates.setdefault(waiter.tenant, []).append(waiter)
        most = max(len(waiting) for waiting in candidates.values())
        if len(candidates[waiter.tenant]) == most:
            return max(candidates[waiter.tenant], key=Waiter.rank)
        return max(
            (max(waiting, key=Waiter.rank) for waiting in candidates.values() if len(waiting) == most),
            key=lambda waiting: waiting.number,
        )

    def _next(self) -> Waiter | None:
        if self._again:
            return self._again[0]
        busy = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not busy:
            return None
        if self._num_turns % NUM_TURNS_A_ROUND == NUM_TURNS_A_ROUND - 1:
            return min((waiter for tenant in busy for waiter in tenant.waiting), key=lambda waiter: waiter.number)
        return min(busy, key=lambda tenant: (tenant.mark, min(t.number for t in tenant.waiting))).waiting[0]

    def _lowest_mark(self) -> float:
        """Of the tenants that wait."""
        return min((tenant.mark for tenant in self._tenants.values() if tenant.waiting), default=0.0)

    def _forget_idle(self) -> None:
        """Tenants that would start at the lowest mark anyway. When nobody waits, all are equal again."""
        floor = self._lowest_mark()
        for name in [name for name, tenant in self._tenants.items() if not tenant.waiting]:
            if not self._num_waiting or self._tenants[name].mark <= floor:
                del self._tenants[name]
