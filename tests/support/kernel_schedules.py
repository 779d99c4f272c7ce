"""How sequences may be computed: steps of any rows, in any order that leaves each sequence's own intact."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from support.kernel_cases import PagedRun, Row


@st.composite
def schedules(draw: st.DrawFn, lengths: list[int]) -> list[list[Row]]:
    """Steps that compute all positions of all sequences, each in order: chunks and single rows, mixed at will."""
    done = [0] * len(lengths)
    steps = []
    while any(position < length for position, length in zip(done, lengths, strict=True)):
        step: list[Row] = []
        for sequence, length in enumerate(lengths):
            count = min(draw(st.sampled_from([200, 64, 17, 5, 3, 2, 1, 0])), length - done[sequence])
            step += [Row(sequence=sequence, position=done[sequence] + i) for i in range(count)]
            done[sequence] += count
        if step:
            steps.append(step)
    return steps


def run_all(run: PagedRun, steps: list[list[Row]], expanded: bool) -> dict[Row, torch.Tensor]:
    return {row: out for step in steps for row, out in zip(step, run.step(step, expanded), strict=True)}
