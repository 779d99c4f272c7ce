"""Packs spans of sequences into the rows of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

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
    positions_T = _positions(spans)
    sequence_T = np.repeat(np.arange(len(spans), dtype=np.int32), [span.count for span in spans])
    tables_SB = _block_tables(spans, block_size)
    blocks_T = tables_SB[sequence_T, positions_T // block_size]
    slots_T = blocks_T.astype(np.int64) * block_size + positions_T % block_size
    tables = torch.from_numpy(tables_SB).to(device)

    def rows(chosen: npt.NDArray[np.int64] | slice) -> Rows:
        return Rows(
            positions_T=torch.from_numpy(positions_T[chosen]).to(device),
            sequence_T=torch.from_numpy(sequence_T[chosen]).to(device),
            block_tables_SB=tables, slots_T=torch.from_numpy(slots_T[chosen]).to(device),
        )

    if not expand_prompts:
        return StepRows(rows=rows(slice(None)))
    is_prompt_T = positions_T < np.array([span.sequence.num_prompt_tokens for span in spans])[sequence_T]

    def subset(chosen_T: npt.NDArray[np.bool_]) -> RowSubset | None:
        indices = np.flatnonzero(chosen_T)
        if not len(indices):
            return None
        return RowSubset(indices=torch.from_numpy(indices).to(device), rows=rows(indices))

    return StepRows(rows=rows(slice(None)), expanded=subset(is_prompt_T), absorbed=subset(~is_prompt_T))


def token_ids(spans: Seq[Span], device: torch.device = CPU) -> torch.Tensor:
    """The known tokens of the spans: int64 [T]."""
    ids = [token for span in spans for token in span.sequence.token_ids[span.start : span.end]]
    return torch.tensor(ids, device=device)


def _positions(spans: Seq[Span]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans])


def _block_tables(spans: Seq[Span], block_size: int) -> npt.NDArray[np.int32]:
    """The blocks that hold positions 0..end-1 of each span's sequence; -1 beyond."""
    counts = [-(-span.end // block_size) for span in spans]
    tables_SB = np.full((len(spans), max(counts)), -1, dtype=np.int32)
    for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
        blocks = span.sequence.block_ids
        assert len(blocks) >= count, f"{span.sequence.name}: {len(blocks)} blocks do not hold {span.end} slots"
        tables_SB[row, :count] = blocks[:count]
    return tables_SB
