"""Prompts that a compute thread works on, and whose turn it is: of a prefill worker, and of a decode worker that
computes some itself."""

from __future__ import annotations

from pd_engine.chunk_plan import Remaining, plan_chunks
from pd_engine.priority import Turn
from pd_engine.sequence import Sequence
from pd_engine.steps.prefill import Chunk


class PromptQueue:
    """Belongs to the compute thread."""

    def __init__(self) -> None:
        self._prompts: dict[str, Sequence] = {}  # by arrival
        self._turns: dict[str, Turn] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: Sequence, turn: Turn) -> None:
        """Takes a prompt whose blocks cover all its tokens."""
        assert prompt.name not in self._prompts, prompt.name
        assert prompt.num_computed < prompt.num_tokens, prompt
        self._prompts[prompt.name] = prompt
        self._turns[prompt.name] = turn

    def drop(self, name: str) -> None:
        """Forgets a prompt, if it is still here."""
        self._prompts.pop(name, None)
        self._turns.pop(name, None)

    def overdue(self, now_s: float) -> list[str]:
        """Those whose deadline has passed."""
        return [name for name, turn in self._turns.items() if turn.is_overdue(now_s)]

    def plan(self, num_tokens: int) -> list[Chunk]:
        """What the next step computes, so many tokens in all at most (>= 1)."""
        names = sorted(self._prompts, key=lambda name: self._turns[name].rank)  # stable: ties by arrival
        queue = [
            Remaining(name, prompt.num_tokens - prompt.num_computed, self._turns[name].priority)
            for name in names
            for prompt in [self._prompts[name]]
        ]
        return [
            Chunk(sequence=self._prompts[plan.name], num_tokens=plan.num_tokens)
            for plan in plan_chunks(queue, num_tokens)
        ]
