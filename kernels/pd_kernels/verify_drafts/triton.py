"""Acceptance of drafts on a GPU: one program a sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def verify_kernel(sampled_ptr, drafts_ptr, num_drafts_ptr, room_ptr, ending_ptr, counts_ptr, max_drafts, num_ending,
                  BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr):
    """One sequence."""
    row = tl.program_id(0)
    index, ending_index = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_N)
    mask = index < tl.load(num_drafts_ptr + row)
    sampled = tl.load(sampled_ptr + row * (max_drafts + 1) + index, mask=mask, other=0)
    draft = tl.load(drafts_ptr + row * max_drafts + index, mask=mask, other=0)
    ending = tl.load(ending_ptr + row * num_ending + ending_index, mask=ending_index < num_ending, other=-1)
    ends = tl.sum((sampled[:, None] == ending[None, :]).to(tl.int32), 1) > 0
    accepted = (mask & (sampled == draft) & (ends == 0)).to(tl.int32)
    in_a_row = tl.sum((tl.cumsum(accepted, 0) == index + 1).to(tl.int32), 0)
    tl.store(counts_ptr + row, tl.minimum(1 + in_a_row, tl.load(room_ptr + row)))


def verify_drafts(sampled_SJ: Tensor, drafts_SJ: Tensor, num_drafts_S: Tensor, room_S: Tensor,
                  ending_SN: Tensor) -> Tensor:
    """int32 [S]: how many of each sequence's sampled tokens are emitted; arguments as the reference's."""
    (num_sequences, max_rows), num_ending = sampled_SJ.shape, ending_SN.shape[1]
    counts_S = torch.empty_like(num_drafts_S)
    if num_sequences:
        verify_kernel[(num_sequences,)](
            sampled_SJ, drafts_SJ, num_drafts_S, room_S, ending_SN, counts_S, max_rows - 1, num_ending,
            BLOCK_J=triton.next_power_of_2(max_rows), BLOCK_N=max(1, triton.next_power_of_2(num_ending)), num_warps=1)
    return counts_S
