"""kv_b_proj split a head, and moved to the query and output side of attention (DeepSeek-V2 report, section 2.1.2).

    score_h = q_nope_h · (W_uk_h c) = (q_nope_h W_uk_h) · c        o_h = W_uv_h (Σ p c)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.linear.reference import matmul
from pd_kernels.rope.reference import rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsorbedWeight:
    """float32: w_uk_HCN (transposed, so that a product is x W^T), w_uk_HNC, w_uv_HVC."""

    w_uk_HCN: Tensor
    w_uk_HNC: Tensor
    w_uv_HVC: Tensor

    @property
    def num_heads(self) -> int:
        return self.w_uk_HNC.shape[0]

    @property
    def nope_width(self) -> int:
        return self.w_uk_HNC.shape[1]

    @property
    def latent_width(self) -> int:
        return self.w_uk_HNC.shape[2]


def pack_absorbed(w_uk_HNC: Tensor, w_uv_HVC: Tensor) -> AbsorbedWeight:
    """fp32 copies."""
    w_uk = w_uk_HNC.float().contiguous()
    return AbsorbedWeight(
        w_uk_HCN=w_uk.transpose(1, 2).contiguous(), w_uk_HNC=w_uk, w_uv_HVC=w_uv_HVC.float().contiguous()
    )


def matmul_per_head(x_THK: Tensor, weight_HMK: Tensor, min_rows: int) -> Tensor:
    """x_h W_h^T for each head: float32 [T, H, M]."""
    x = x_THK.float()
    heads = [matmul(x[:, h].contiguous(), weight_HMK[h], min_rows) for h in range(x.shape[1])]
    return torch.stack(heads, dim=1)


def mla_queries(q_TF: Tensor, weight: AbsorbedWeight, rope_P2R: Tensor, positions_T: Tensor, min_rows: int) -> Tensor:
    """q_THE = [q_nope W_uk | rope(q_rope)], rounded once to the dtype of q."""
    q_THF = q_TF.reshape(q_TF.shape[0], weight.num_heads, q_TF.shape[1] // weight.num_heads)
    absorbed = matmul_per_head(q_THF[..., : weight.nope_width], weight.w_uk_HCN, min_rows)
    rotated = rotate(q_THF[..., weight.nope_width :], rope_P2R, positions_T)
    return torch.cat([absorbed, rotated], dim=-1).to(q_TF.dtype)


def absorb_values(o_THC: Tensor, weight: AbsorbedWeight, min_rows: int) -> Tensor:
    """o_h W_uv_h^T, heads side by side: [T, H·V], rounded once."""
    return matmul_per_head(o_THC, weight.w_uv_HVC, min_rows).flatten(1).to(o_THC.dtype)
