"""Norm, rotate and write one latent a row into the paged cache on a GPU, as bf16, float32 or FP8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.latent_fp8 import triton as fp8
from pd_kernels.latent_fp8.reference import slot_bytes
from pd_kernels.ops import Rows
from pd_kernels.rms_norm.triton import normalize
from pd_kernels.rope.triton import rotate


@triton.jit
def latent_write_kernel(kv_ptr, weight_ptr, rope_ptr, positions_ptr, slots_ptr, c_ptr, scale_ptr, k_ptr, eps,
                        latent_width, num_pairs, kv_stride, c_stride, scale_stride, scale_start, k_stride, k_start,
                        FP8: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr):
    """One row. `c_ptr`, `scale_ptr` and `k_ptr` are views of the same cache, with strides in their own numbers."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    source = kv_ptr + row * kv_stride
    column = tl.arange(0, BLOCK_C)
    mask = column < latent_width
    c = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    c = normalize(c, weight_ptr, column, mask, latent_width, eps)
    if FP8:
        groups = tl.reshape(c, [BLOCK_C // fp8.GROUP, fp8.GROUP])
        scale = fp8.power_of_two_scale(tl.max(fp8.magnitude(groups), 1))
        group = tl.arange(0, BLOCK_C // fp8.GROUP)
        tl.store(scale_ptr + slot * scale_stride + scale_start + group, scale, mask=group * fp8.GROUP < latent_width)
        c = tl.reshape(tl.div_rn(groups, scale[:, None]), [BLOCK_C])
        tl.store(c_ptr + slot * c_stride + column, fp8.to_e4m3(c), mask=mask)
    else:
        tl.store(c_ptr + slot * c_stride + column, c.to(c_ptr.dtype.element_ty), mask=mask)
    pair = tl.arange(0, BLOCK_P)
    mask_P = pair < num_pairs
    angle = rope_ptr + tl.load(positions_ptr + row).to(tl.int64) * 2 * num_pairs + pair
    a = tl.load(source + latent_width + 2 * pair, mask=mask_P, other=0.0).to(tl.float32)
    b = tl.load(source + latent_width + 2 * pair + 1, mask=mask_P, other=0.0).to(tl.float32)
    a, b = rotate(a, b, tl.load(angle, mask=mask_P, other=0.0), tl.load(angle + num_pairs, mask=mask_P, other=0.0))
    target = k_ptr + slot * k_stride + k_start + 2 * pair
    tl.store(target, a.to(k_ptr.dtype.element_ty), mask=mask_P)
    tl.store(target + 1, b.to(k_ptr.dtype.element_ty), mask=mask_P)


def latent_write(kv_TE: Tensor, norm_weight_C: Tensor, eps: float, rope_P2R: Tensor, rows: Rows,
                 cache_GKE: Tensor) -> None:
    """[rms_norm(c_raw) | rope(k_rope)] of each row, rounded once to the cache's format, into its slot.

    A uint8 cache holds FP8 slots (pd_kernels.latent_fp8.reference).
    """
    num_rows, latent_width, num_pairs = kv_TE.shape[0], norm_weight_C.shape[0], rope_P2R.shape[-1]
    if num_rows == 0:
        return
    assert kv_TE.stride(1) == 1 and cache_GKE.is_contiguous(), (kv_TE.stride(), cache_GKE.stride())
    is_fp8 = cache_GKE.dtype == torch.uint8
    c, scale, k = fp8.views(cache_GKE) if is_fp8 else (cache_GKE, None, cache_GKE)
    assert not is_fp8 or cache_GKE.shape[-1] == slot_bytes(latent_width, 2 * num_pairs), cache_GKE.shape
    latent_write_kernel[(num_rows,)](
        kv_TE, norm_weight_C, rope_P2R, rows.positions_T, rows.slots_T, c, scale, k, eps, latent_width, num_pairs,
        kv_TE.stride(0), c.shape[-1], 0 if scale is None else scale.shape[-1], latent_width // 4, k.shape[-1],
        k.shape[-1] - 2 * num_pairs, FP8=is_fp8, BLOCK_C=triton.next_power_of_2(latent_width),
        BLOCK_P=triton.next_power_of_2(num_pairs), num_warps=4, enable_fp_fusion=False,
    )
