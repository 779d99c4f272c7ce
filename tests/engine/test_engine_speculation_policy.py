"""How many drafts pay: the policy against hosts with made-up costs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pd_engine.steps.speculation import MAX_TRIAL_INTERVAL, SpeculationPolicy

Cost = Callable[[int, int], float]  # (sequences, drafts) -> seconds of a step


class Host:
    """Steps that take what `cost` says, with noise; drafts are accepted at the rate of their depth."""

    def __init__(self, cost: Cost, rates: list[float], *, max_drafts: int, seed: int = 0) -> None:
        self.cost = cost
        self.rates = rates
        self.policy = SpeculationPolicy(max_drafts)
        self._random = random.Random(seed)

    def run(self, num_steps: int, num_sequences: int) -> tuple[float, float, list[int]]:
        """(tokens, seconds, drafts of each step)."""
        tokens, seconds, chosen = 0.0, 0.0, []
        for _ in range(num_steps):
            drafts = self.policy.choose(num_sequences)
            accepted = [self._accepted(drafts) for _ in range(num_sequences)]
            step_s = self.cost(num_sequences, drafts) * self._random.uniform(0.98, 1.02)
            if self._random.random() < 0.01:
                step_s *= 20  # somebody else had the core
            self.policy.record(num_sequences, step_s, [drafts] * num_sequences, accepted)
            tokens += sum(1 + count for count in accepted)
            seconds += self.cost(num_sequences, drafts)
            chosen.append(drafts)
        return tokens, seconds, chosen

    def _accepted(self, drafts: int) -> int:
        count = 0
        while count < drafts and self._random.random() < self.rates[count]:
            count += 1
        return count


def per_row(per_step: float, per_draft: float) -> Cost:
    return lambda num_sequences, drafts: per_step + per_draft * num_sequences * drafts


@pytest.mark.parametrize("seed", range(5))
def test_off_where_it_does_not_pay(seed: int) -> None:
    host = Host(per_row(1e-3, 0.9e-3), [0.6], max_drafts=1, seed=seed)
    tokens, seconds, chosen = host.run(4000, 1)
    assert seconds / tokens <= 1.01 * 1e-3, "trials cost more than a hundredth"
    assert 0 < sum(chosen) < 100


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rates", "per_draft", "best"), [
    ([0.85], 0.1e-3, 1),
    ([0.9, 0.85, 0.8, 0.1], 0.1e-3, 3),
    ([0.9, 0.2, 0.2, 0.2], 0.2e-3, 1),
])
def test_as_many_as_pay(rates: list[float], per_draft: float, best: int, seed: int) -> None:
    host = Host(per_row(1e-3, per_draft), rates, max_drafts=len(rates), seed=seed)
    host.run(2000, 1)
    tokens, seconds, chosen = host.run(4000, 1)
    assert chosen.count(best) > 0.9 * len(chosen)
    expected, chance = 1.0, 1.0
    for rate in rates[:best]:
        chance *= rate
        expected += chance
    assert tokens / seconds > 0.95 * expected / (1e-3 + per_draft * best)


def test_each_batch_size_for_itself() -> None:
    """Drafts are nearly free alone, and cost as much as a token in a full batch."""
    host = Host(per_row(1e-3, 0.1e-3), [0.8], max_drafts=1)
    for _ in range(10):
        host.run(200, 1)
        host.run(200, 32)
    assert host.run(50, 1)[2].count(1) > 40
    assert host.run(50, 32)[2].count(0) > 40


@pytest.mark.parametrize("seed", range(5))
def test_it_follows_what_changes(seed: int) -> None:
    """Also back: what was seen long ago weighs little against a trial that goes well."""
    host = Host(per_row(1e-3, 0.2e-3), [0.9], max_drafts=1, seed=seed)
    assert host.run(1000, 2)[2][-50:].count(1) > 40
    host.rates = [0.05]
    assert host.run(3000, 2)[2][-2000:].count(0) > 1900
    host.rates = [0.95]
    host.run(2 * MAX_TRIAL_INTERVAL, 2)
    assert host.run(500, 2)[2].count(1) > 400


@pytest.mark.parametrize("seed", range(5))
def test_a_growing_context_makes_no_step_look_dearer_than_another(seed: int) -> None:
    """Steps become thirty times as long within an answer, and short again in the next one; drafts pay all the while."""
    context = 0

    def cost(num_sequences: int, drafts: int) -> float:
        nonlocal context
        context = context % 3000 + 1
        return 1e-3 * (1 + context / 100) * (1 + 0.25 * drafts)

    host = Host(cost, [0.9], max_drafts=1, seed=seed)
    host.run(500, 1)
    assert host.run(9000, 1)[2].count(1) > 8500


@pytest.mark.parametrize("pays", [True, False])
def test_some_who_never_draft_hide_nothing_of_the_others(pays: bool) -> None:
    """Of four sequences one drafts."""
    policy, chance = SpeculationPolicy(1), random.Random(0)
    chosen = []
    for _ in range(3000):
        drafts = policy.choose(4)
        step_s = 1e-3 * (1 + (0.1 if pays else 0.3) * drafts) * chance.uniform(0.995, 1.005)
        policy.record(4, step_s, [drafts, 0, 0, 0], [drafts and int(chance.random() < 0.8), 0, 0, 0])
        chosen.append(drafts)
    assert (sum(chosen[1000:]) > 1800) is pays


def test_it_says_where_no_acceptance_would_make_drafts_pay() -> None:
    """After two trials; and not while one batch size is left where they could."""
    host = Host(per_row(1e-3, 1.3e-3), [0.7], max_drafts=1)
    host.run(20, 8)
    assert not host.policy.is_futile, "nothing is known"
    host.run(500, 8)
    assert host.policy.is_futile
    host.cost = per_row(1e-3, 0.9e-3)
    host.run(500, 1)
    assert not host.policy.is_futile, "nine in ten would do, alone"


def test_batch_sizes_that_take_turns_are_learnt_both() -> None:
    host = Host(per_row(1e-3, 0.1e-3), [0.8], max_drafts=1)
    for _ in range(400):
        host.run(1, 4)
        host.run(1, 5)
    chosen = [host.run(1, size)[2][0] for _ in range(50) for size in (4, 5)]
    assert chosen.count(1) > 80


def test_never_more_than_allowed() -> None:
    assert SpeculationPolicy(0).choose(1) == 0
    host = Host(per_row(1e-3, 1e-6), [1.0, 1.0], max_drafts=2)
    assert set(host.run(3000, 1)[2]) == {0, 1, 2}


def test_drafts_that_a_sequence_had_no_room_for_are_not_counted_as_refused() -> None:
    policy = SpeculationPolicy(2)
    for _ in range(100):
        policy.record(1, 1e-3, [1], [1])
    assert policy.acceptance(0) == 1.0
    assert policy.tokens(1) == 2.0
