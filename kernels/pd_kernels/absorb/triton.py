"""Both halves of kv_b_proj, absorbed into the queries and the output, on a GPU: products a head."""

from dataclasses import dataclass

from torch import Tensor

from pd_kernels.linear.triton import matmul
from pd_kernels.rope.triton import rotate_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsorbedWeight:
    """In the storage dtype: w_uk_HCN (transposed, so that a product is x W^T), w_uk_HNC, w_uv_HVC."""

    w_uk_HCN: Tensor
    w_uk_HNC: Tensor
    w_uv_HVC: Tensor


def pack_absorbed(w_uk_HNC: Tensor, w_uv_HVC: Tensor) -> AbsorbedWeight:
    """Copies in the layouts that the products read."""
    return AbsorbedWeight(
        w_uk_HCN=w_uk_HNC.transpose(1, 2).contiguous(), w_uk_HNC=w_uk_HNC.contiguous(), w_uv_HVC=w_uv_HVC.contiguous()
    )


def mla_queries(q_TF: Tensor, weight: AbsorbedWeight, rope_P2R: Tensor, positions_T: Tensor) -> Tensor:
    """q_THE = [q_nope W_uk | rope(q_rope)], rounded once to the dtype of q."""
    num_heads, latent_width, nope_width = weight.w_uk_HCN.shape
    q_THF = q_TF.unflatten(1, (num_heads, -1))
    out_THE = q_TF.new_empty(q_TF.shape[0], num_heads, latent_width + q_THF.shape[-1] - nope_width)
    matmul(q_THF[..., :nope_width], weight.w_uk_HCN, out_THE[..., :latent_width])
    rotate_heads(q_THF, rope_P2R, positions_T, out_THE)
    return out_THE


def absorb_values(o_THC: Tensor, weight: AbsorbedWeight) -> Tensor:
    """o_h W_uv_h^T, heads side by side: [T, H·V], rounded once."""
    out_THV = o_THC.new_empty(o_THC.shape[0], o_THC.shape[1], weight.w_uv_HVC.shape[1])
    matmul(o_THC, weight.w_uv_HVC, out_THV)
    return out_THV.flatten(1)
