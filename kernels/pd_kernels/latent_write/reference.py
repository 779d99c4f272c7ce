"""One latent a row: norm of the compressed part, rotation of the shared key, written where the cache wants it."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.latent_fp8.reference import encode
from pd_kernels.ops import Rows
from pd_kernels.rms_norm.reference import normalize
from pd_kernels.rope.reference import rotate


def latent_write(kv_TE: Tensor, norm_weight_C: Tensor, eps: float, rope_P2R: Tensor, rows: Rows,
                 cache_GKE: Tensor) -> None:
    """[rms_norm(c_raw) | rope(k_rope)] of each row, rounded once to the cache's form, into its slot."""
    latent_width = norm_weight_C.shape[0]
    c = normalize(kv_TE[:, :latent_width], norm_weight_C, eps)
    k = rotate(kv_TE[:, latent_width:], rope_P2R, rows.positions_T)
    flat = cache_GKE.view(-1, cache_GKE.shape[-1])
    latent_TE = torch.cat([c, k], dim=-1)
    is_fp8 = cache_GKE.dtype is torch.uint8
    flat[rows.slots_T] = encode(latent_TE, latent_width) if is_fp8 else latent_TE.to(cache_GKE.dtype)
