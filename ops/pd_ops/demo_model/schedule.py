"""How fast things change as the run goes on. `done` is the part of the run that is behind, 0 to 1."""

from __future__ import annotations

WARM_UP_STEPS = 30
DECAY_FROM = 0.4
LOWEST_RATE = 0.02


def learning_rate_factor(step: int, done: float) -> float:
    """Up in `WARM_UP_STEPS`, level until `DECAY_FROM`, then down in a line to `LOWEST_RATE`."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    decay = 1.0 if done < DECAY_FROM else 1 - (done - DECAY_FROM) / (1 - DECAY_FROM)
    return warm_up * max(LOWEST_RATE, decay)


def router_bias_rate(done: float) -> float:
    """By how much an expert's correction bias moves a step: 0.001 lets routing collapse on so short a run."""
    return 0.01 if done < 0.5 else 0.002
