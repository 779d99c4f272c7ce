"""Packs spans of sequences into the rows of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pd_engine.model.mla import RowSubset, StepRows
from pd_engine.sequence import Sequence
from pd_kernels.ops import Rows

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Positions start..start+count-1 of a sequence: consecutive rows of a step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


def build_step(
    spans: Seq[Span], block_size: int, device: torch.device = CPU, *, expand_prompts: bool = False
) -> StepRows:
    """The rows of the spans, in order.

    Args:
        device: where they are to be: that of the ops.
        expand_prompts: whether positions of the prompt attend in the expanded form (`prefill_form: expanded`).
            Generated positions never do, so that a replay gives the bits that decoding gave.
    """
    tables = tensor(_block_tables(spans, block_size), device)
    # Lists first: of a few rows, as in decode steps, they cost less than operations on arrays would.
    places = [(index, position) for index, span in enumerate(spans) for position in range(span.start, span.end)]
    positions_T = np.array([position for _, position in places], dtype=np.int32)
    sequence_T = np.array([index for index, _ in places], dtype=np.int32)
    slots_T = np.array([
        spans[index].sequence.block_ids[position // block_size] * block_size + position % block_size
        for index, position in places
    ], dtype=np.int64)
    rows = Rows(
        positions_T=tensor(positions_T, device), sequence_T=tensor(sequence_T, device), block_tables_SB=tables,
        slots_T=tensor(slots_T, device),
    )
    if not expand_prompts:
        return StepRows(rows=rows)
    is_prompt_T = positions_T < np.array([span.sequence.num_prompt_tokens for span in spans])[sequence_T]

    def subset(chosen_T: npt.NDArray[np.bool_]) -> RowSubset | None:
        indices = np.flatnonzero(chosen_T)
        if not len(indices):
            return None
        return RowSubset(indices=tensor(indices, device), rows=Rows(
            positions_T=tensor(positions_T[indices], device), sequence_T=tensor(sequence_T[indices], device),
            block_tables_SB=tables, slots_T=tensor(slots_T[indices], device),
        ))

    return StepRows(rows=rows, expanded=subset(is_prompt_T), absorbed=subset(~is_prompt_T))


def token_ids(spans: Seq[Span], device: torch.device = CPU) -> torch.Tensor:
    """The known tokens of the spans: int64 [T]."""
    ids = [token for span in spans for token in span.sequence.token_ids[span.start : span.end]]
    return tensor(np.array(ids, dtype=np.int64), device)


def tensor(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor, there: over the same memory on the CPU."""
    shared = torch.from_numpy(values)
    return shared if device.type == "cpu" else shared.to(device)


def _block_tables(spans: Seq[Span], block_size: int) -> npt.NDArray[np.int32]:
    """The blocks that hold positions 0..end-1 of each span's sequence; -1 beyond."""
    counts = [-(-span.end // block_size) for span in spans]
    tables_SB = np.full((len(spans), max(counts)), -1, dtype=np.int32)
    for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
        blocks = span.sequence.block_ids
        assert len(blocks) >= count, f"{span.sequence.name}: {len(blocks)} blocks do not hold {span.end} slots"
        tables_SB[row, :count] = blocks[:count]
    return tables_SB
