"""Acceptance of drafts: a draft is accepted exactly when it equals the token that the target model samples there.

Row 0 of a sequence samples the token after its last one, row j the token after draft j - 1. What row 0 samples is
always emitted; row j's token is emitted if every draft before it was accepted, none of the tokens emitted before it
ends the sequence, and there is room.

Shape suffixes: S sequences, J the most rows a sequence, N ending tokens a sequence at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1  # pads `ending_SN`


def verify_drafts(sampled_SJ: Tensor, drafts_SJ: Tensor, num_drafts_S: Tensor, room_S: Tensor,
                  ending_SN: Tensor) -> Tensor:
    """int32 [S]: how many of each sequence's sampled tokens are emitted, from 1 to num_drafts + 1.

    Args:
        sampled_SJ: int32, the target's token of each row; beyond num_drafts + 1 anything.
        drafts_SJ: int32 [S, J - 1], beyond num_drafts anything.
        num_drafts_S: int32, at most J - 1.
        room_S: int32, at least 1: no more than that many tokens are emitted.
        ending_SN: int32, tokens that end the sequence, padded with -1.
    """
    counts_S = torch.ones_like(num_drafts_S)
    for row in range(sampled_SJ.shape[0]):
        for draft in range(int(num_drafts_S[row])):
            token = int(sampled_SJ[row, draft])
            ends = token in ending_SN[row].tolist()
            if int(drafts_SJ[row, draft]) != token or ends or int(counts_S[row]) >= int(room_S[row]):
                break
            counts_S[row] += 1
    return counts_S
