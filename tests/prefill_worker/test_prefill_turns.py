"""Whose turn it is in a prefill worker's compute thread: priorities and deadlines."""

from __future__ import annotations

from typing import Any, cast

from pd_engine.errors import DeadlineExceeded, Internal
from pd_engine.priority import Turn
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import SampledToken
from pd_engine.sequence import Sequence as Prompt
from pd_engine.steps.prefill import Chunk
from prefill_worker.runner import PrefillRunner, StepReport

PARAMS = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=1)


class Counting(PrefillRunner):
    """Computes nothing, and keeps what it was to compute."""

    def __init__(self, chunk_tokens: int) -> None:
        self.reports: list[StepReport] = []
        self.chunks: list[list[tuple[str, int]]] = []
        self.now_s = 0.0
        super().__init__(cast(Any, None), chunk_tokens, self.reports.append, clock=lambda: self.now_s)

    def _compute(self, chunks: list[Chunk]) -> list[tuple[Prompt, SampledToken | Internal]]:
        self.chunks.append([(chunk.sequence.name, chunk.num_tokens) for chunk in chunks])
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
        return [(c.sequence, SampledToken(token_id=1)) for c in chunks if c.sequence.num_computed == 100]


def prompt(name: str) -> Prompt:
    return Prompt(name=name, token_ids=[1] * 100, num_prompt_tokens=100, params=PARAMS, ending_ids=frozenset())


def test_a_more_urgent_prompt_overtakes_one_that_has_begun() -> None:
    runner = Counting(chunk_tokens=40)
    runner.add(prompt("usual"), None, Turn(arrived_s=0.0))
    runner.step()
    runner.add(prompt("urgent"), None, Turn(priority=-1, arrived_s=0.1))
    for _ in range(4):
        runner.step()
    assert runner.chunks[0] == [("usual", 40)]
    assert runner.chunks[1:] == [[("urgent", 40)], [("urgent", 40)], [("urgent", 20), ("usual", 20)], [("usual", 40)]]
    done = [first.name for report in runner.reports for first in report.first_tokens]
    assert done == ["urgent", "usual"]


def test_an_earlier_deadline_goes_first_and_a_short_prompt_has_its_part_all_the_same() -> None:
    runner = Counting(chunk_tokens=40)
    runner.add(prompt("patient"), None, Turn(arrived_s=0.0, deadline_s=600.0))
    runner.add(prompt("pressed"), None, Turn(arrived_s=1.0, deadline_s=4.0))
    runner.add(prompt("plain"), None, Turn(arrived_s=2.0))
    short = prompt("short")
    short.num_computed = 90
    runner.add(short, None, Turn(arrived_s=3.0))
    runner.step()
    runner.step()
    assert runner.chunks[0] == [("pressed", 20), ("patient", 10), ("short", 10)]
    assert runner.chunks[1][0] == ("pressed", 20)


def test_what_is_overdue_is_ended_before_more_of_it_is_computed() -> None:
    runner = Counting(chunk_tokens=40)
    runner.add(prompt("late"), None, Turn(deadline_s=5.0))
    runner.add(prompt("patient"), None, Turn(arrived_s=1.0))
    runner.step()
    runner.now_s = 5.0
    runner.step()
    assert runner.chunks == [[("late", 20), ("patient", 20)], [("patient", 40)]]
    assert isinstance(runner.reports[1].failed["late"], DeadlineExceeded)
    runner.drop("patient")
    assert runner.step() is False


def test_nothing_is_computed_for_one_that_came_too_late() -> None:
    runner = Counting(chunk_tokens=40)
    runner.add(prompt("late"), None, Turn(deadline_s=0.0))
    assert runner.step() is True
    assert runner.chunks == []
    assert list(runner.reports[0].failed) == ["late"]
    assert runner.step() is False
