"""Who comes next: fairness between tenants, priorities within one, and who has to go when the line is full."""

from __future__ import annotations

from collections import Counter

from pd_router.waiting_line import NUM_TURNS_A_ROUND, Waiter, WaitingLine


def line_of(*waiters: Waiter, max_waiting: int = 1_000) -> WaitingLine:
    line = WaitingLine(max_waiting=max_waiting)
    for waiter in waiters:
        assert line.join(waiter) is None
    return line


def served(line: WaitingLine, most: int = 10_000) -> list[Waiter]:
    turns: list[Waiter] = []
    while (head := line.head) is not None and len(turns) < most:
        line.serve(head)
        turns.append(head)
    return turns


def test_one_tenant_in_order_of_arrival() -> None:
    waiters = [Waiter() for _ in range(9)]
    assert served(line_of(*waiters)) == waiters


def test_a_lower_priority_value_comes_earlier_but_the_oldest_has_every_fourth_turn() -> None:
    late = [Waiter(priority=0) for _ in range(2)]
    urgent = [Waiter(priority=-5) for _ in range(8)]
    turns = served(line_of(*late, *urgent))
    assert turns[:4] == [*urgent[:3], late[0]]
    assert turns[4:8] == [*urgent[3:6], late[1]]


def test_tenants_share_by_tokens_not_by_requests() -> None:
    """One asks for much with each request, the other for little: both get as much."""
    large = [Waiter(tenant="large", num_tokens=400) for _ in range(100)]
    small = [Waiter(tenant="small", num_tokens=100) for _ in range(400)]
    turns = served(line_of(*large, *small), most=100)
    tokens = Counter[str]()
    for waiter in turns:
        tokens[waiter.tenant] += waiter.num_tokens
    assert abs(tokens["large"] - tokens["small"]) <= 500 * (1 + 100 // NUM_TURNS_A_ROUND)  # the oldest ones' turns


def test_a_flood_delays_another_tenants_request_by_one_of_its_own() -> None:
    flood = [Waiter(tenant="flood", num_tokens=100) for _ in range(200)]
    line = line_of(*flood)
    served(line, most=21)
    guest = Waiter(tenant="guest", num_tokens=100)
    line.join(guest)
    assert guest in served(line, most=3)


def test_nobody_saves_up_turns_by_waiting_with_nothing_to_do() -> None:
    busy = [Waiter(tenant="busy") for _ in range(100)]
    line = line_of(*busy, Waiter(tenant="idle"))
    served(line, most=40)
    for _ in range(50):
        line.join(Waiter(tenant="idle"))
    turns = Counter(waiter.tenant for waiter in served(line, most=20))
    assert turns["busy"] >= 10


def test_those_that_were_let_in_before_come_first_even_before_the_head() -> None:
    line = line_of(Waiter(), Waiter())
    assert line.head is not None
    again = [Waiter(is_again=True), Waiter(is_again=True)]
    for waiter in again:
        line.join(waiter)
    assert served(line, most=2) == again


def test_the_head_stays_whoever_comes() -> None:
    line = line_of(Waiter(priority=5))
    head = line.head
    line.join(Waiter(priority=-5))
    assert line.head is head
    assert head is not None
    line.leave(head)
    assert line.head is not head


def test_a_full_line_refuses_the_newcomer_of_the_tenant_with_most() -> None:
    line = line_of(*(Waiter(tenant="a") for _ in range(4)), max_waiting=4)
    newcomer = Waiter(tenant="a")
    assert line.join(newcomer) is newcomer
    assert len(line) == 4


def test_in_a_full_line_the_tenant_with_most_makes_room_for_another_one() -> None:
    waiters = [Waiter(tenant="a", priority=priority) for priority in (0, 9, 0, 3)]
    line = line_of(*waiters, max_waiting=4)
    guest = Waiter(tenant="b")
    assert line.join(guest) is waiters[1]
    assert len(line) == 4
    assert guest in served(line)


def test_in_a_full_line_a_more_urgent_one_takes_the_place_of_its_tenants_least_urgent() -> None:
    waiters = [Waiter(priority=3), Waiter(priority=4)]
    line = line_of(*waiters, max_waiting=2)
    assert line.join(Waiter(priority=0)) is waiters[1]


def test_a_line_without_places_takes_only_those_that_were_let_in_before() -> None:
    line = line_of(max_waiting=0)
    waiter = Waiter()
    assert line.join(waiter) is waiter
    assert line.join(Waiter(is_again=True)) is None
    assert len(line) == 1


def test_what_is_ahead_is_ones_own_and_as_much_of_the_others() -> None:
    line = line_of(*(Waiter(tenant="flood", num_tokens=100) for _ in range(50)), Waiter(tenant="a", num_tokens=30))
    assert line.num_tokens_ahead(Waiter(tenant="flood", num_tokens=100)) == 5_000 + 30
    assert line.num_tokens_ahead(Waiter(tenant="new", num_tokens=100)) == 100 + 30
    assert line.num_tokens_ahead(Waiter(tenant="a", num_tokens=70, priority=-1)) == 70
