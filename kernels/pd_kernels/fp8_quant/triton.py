"""Activations in e4m3 on a GPU: one program a row and stretch of groups."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.latent_fp8 import triton as fp8
from pd_kernels.latent_fp8.reference import GROUP

BLOCK_G = 8


@triton.jit
def quant_kernel(x_ptr, q_ptr, scale_ptr, num_in, num_groups, POWER_OF_TWO: tl.constexpr, BLOCK_G: tl.constexpr):
    """Some groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    column = group[:, None] * fp8.GROUP + tl.arange(0, fp8.GROUP)[None, :]
    x = tl.load(x_ptr + row * num_in + column, mask=column < num_in, other=0.0).to(tl.float32)
    amax = tl.max(fp8.magnitude(x), 1)
    scale = fp8.power_of_two_scale(amax)
    if not POWER_OF_TWO:
        scale = tl.div_rn(tl.maximum(amax, fp8.MIN_AMAX), fp8.E4M3_MAX)
    tl.store(q_ptr + row * num_in + column, fp8.to_e4m3(tl.div_rn(x, scale[:, None])), mask=column < num_in)
    tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)


def fp8_quant(x_TK: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(q_TK e4m3, scale_Tg float32); x is contiguous."""
    (num_rows, num_in), num_groups = x_TK.shape, triton.cdiv(x_TK.shape[1], GROUP)
    q_TK = torch.empty(num_rows, num_in, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale_Tg = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x_TK.device)
    assert x_TK.is_contiguous(), x_TK.stride()
    if num_rows:
        quant_kernel[num_rows, triton.cdiv(num_groups, BLOCK_G)](
            x_TK, q_TK, scale_Tg, num_in, num_groups, POWER_OF_TWO=power_of_two, BLOCK_G=BLOCK_G, num_warps=4,
            enable_fp_fusion=False)
    return q_TK, scale_Tg
