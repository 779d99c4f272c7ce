"""How many drafts pay: the policy against hosts with made-up costs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pd_engine.steps.speculation import SpeculationPolicy

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
            self.policy.record(num_sequences, drafts, step_s, [drafts] * num_sequences, accepted)
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


def test_it_follows_what_changes() -> None:
    host = Host(per_row(1e-3, 0.2e-3), [0.9], max_drafts=1)
    assert host.run(1000, 2)[2][-1] == 1
    host.rates = [0.05]
    assert host.run(1500, 2)[2].count(0) > 500
    host.rates = [0.95]
    assert host.run(6000, 2)[2][-200:].count(1) > 150


def test_never_more_than_allowed() -> None:
    assert SpeculationPolicy(0).choose(1) == 0
    host = Host(per_row(1e-3, 1e-6), [1.0, 1.0], max_drafts=2)
    assert set(host.run(3000, 1)[2]) == {0, 1, 2}


def test_drafts_that_a_sequence_had_no_room_for_are_not_counted_as_refused() -> None:
    policy = SpeculationPolicy(2)
    for _ in range(100):
        policy.record(1, 2, 1e-3, [1], [1])
    assert policy.acceptance(0) == 1.0
    assert policy.tokens(1) == 2.0
