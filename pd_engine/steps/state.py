"""The states h that a sequence carries between steps, and their form on the wire."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_engine.cache.arena import TORCH_DTYPES
from pd_engine.errors import InvalidArgument
from pd_engine.sequence import Sequence


def can_draft(sequence: Sequence) -> bool:
    """Whether the MTP layer can go on: every h that it has not been run on is there (a prefix hit on blocks without
    MTP slots, or decoding without speculation, ends this until those positions are computed again)."""
    hidden = sequence.pending_hidden
    return hidden is not None and hidden.shape[0] == sequence.num_computed - sequence.num_computed_mtp + 1


def last_hidden(sequence: Sequence) -> Tensor:
    """h of position num_computed-1, [1, D]: what the next token is sampled from."""
    assert sequence.pending_hidden is not None, f"{sequence.name}: nothing has been computed"
    return sequence.pending_hidden[-1:]


def take_cached(sequence: Sequence, *, num_cached: int, num_cached_mtp: int) -> None:
    """The first `num_cached` positions of a new sequence are in its blocks, which a cache knew; those of the MTP layer
    up to `num_cached_mtp`.

    The last of them is computed again where its h is needed: by the MTP layer at the next position, or because nothing
    else is left to compute. That writes the same bits to its slot. Where MTP slots are missing the MTP layer cannot go
    on, and the sequence does not draft.
    """
    assert sequence.num_computed == 0 and 0 <= num_cached_mtp <= num_cached <= sequence.num_tokens, sequence.name
    is_needed = num_cached_mtp == num_cached or num_cached == sequence.num_tokens
    sequence.num_computed = num_cached - 1 if num_cached and is_needed else num_cached
    sequence.num_computed_mtp = num_cached_mtp


def export_hidden(sequence: Sequence) -> bytes:
    """`last_hidden` as raw bytes in the engine's dtype: part of a handoff."""
    return last_hidden(sequence).contiguous().view(torch.uint8).cpu().numpy().tobytes()


def import_hidden(raw: bytes, *, hidden_size: int, dtype: str) -> Tensor:
    """What `export_hidden` gave, as [1, D] in `dtype` ("bf16", "fp16" or "fp32").

    Raises:
        InvalidArgument: the number of bytes is not that of one row.
    """
    expected = hidden_size * TORCH_DTYPES[dtype].itemsize
    if len(raw) != expected:
        raise InvalidArgument(
            f"the last hidden state must have {expected} bytes ({hidden_size} {dtype}), got {len(raw)}"
        )
    return torch.frombuffer(bytearray(raw), dtype=TORCH_DTYPES[dtype]).view(1, hidden_size)
