"""The noaux_tc router on a GPU: the router's product, and then everything else in one pass over its scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.elementary.triton import sigmoid
from pd_kernels.linear.triton import linear
from pd_kernels.ops import GateConfig

BLOCK_T = 4


@triton.jit(do_not_specialize=["num_rows"])
def gate_kernel(logits_ptr, bias_ptr, weights_ptr, experts_ptr, num_rows, scale, GROUPS: tl.constexpr,
                GROUP_EXPERTS: tl.constexpr, GROUPS_KEPT: tl.constexpr, K: tl.constexpr, NORMALIZE: tl.constexpr,
                BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block of rows. Experts stand as [group, expert of the group], both padded to powers of two."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    expert_GE = group[:, None] * GROUP_EXPERTS + member[None, :]
    real_GE = (group < GROUPS)[:, None] & (member < GROUP_EXPERTS)[None, :]
    logits = tl.load(logits_ptr + row[:, None, None] * (GROUPS * GROUP_EXPERTS) + expert_GE[None, :, :],
                     mask=(row < num_rows)[:, None, None] & real_GE[None, :, :], other=0.0)
    scores = sigmoid(logits)
    bias = tl.load(bias_ptr + expert_GE, mask=real_GE, other=0.0)
    choice = scores + bias[None, :, :]
    choice = tl.where(real_GE[None, :, :] & (choice == choice), choice, float("-inf"))  # NaN may choose no expert
    # Groups: the sum of their two best, then the best groups.
    best, place = tl.max(choice, 2, return_indices=True, return_indices_tie_break_left=True)
    others = tl.where(member[None, None, :] == place[:, :, None], float("-inf"), choice)
    group_scores = best
    if GROUP_EXPERTS > 1:
        group_scores = best + tl.max(others, 2)
    group_scores = tl.where(group[None, :] < GROUPS, group_scores, float("-inf"))
    kept = tl.zeros([BLOCK_T, BLOCK_G], tl.int1)
    for _ in tl.static_range(GROUPS_KEPT):
        _, place = tl.max(group_scores, 1, return_indices=True, return_indices_tie_break_left=True)
        chosen = group[None, :] == place[:, None]
        kept = kept | chosen
        group_scores = tl.where(chosen, float("-inf"), group_scores)
    # Experts: the best of the kept groups, one after the other.
    choice = tl.reshape(tl.where(kept[:, :, None], choice, float("-inf")), [BLOCK_T, BLOCK_G * BLOCK_E])
    scores = tl.reshape(scores, [BLOCK_T, BLOCK_G * BLOCK_E])
    index, rank = tl.arange(0, BLOCK_G * BLOCK_E), tl.arange(0, BLOCK_K)
    experts = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    for k in tl.static_range(K):
        _, place = tl.max(choice, 1, return_indices=True, return_indices_tie_break_left=True)
        chosen = index[None, :] == place[:, None]
        weight = tl.sum(tl.where(chosen, scores, 0.0), 1)
        expert = place // BLOCK_E * GROUP_EXPERTS + place % BLOCK_E
        experts = tl.where(rank[None, :] == k, expert[:, None], experts)
        weights = tl.where(rank[None, :] == k, weight[:, None], weights)
        total += weight
        choice = tl.where(chosen, float("-inf"), choice)
    if NORMALIZE:
        weights = tl.div_rn(weights, (total + 1e-20)[:, None])
    target = row[:, None] * K + rank[None, :]
    mask = (row < num_rows)[:, None] & (rank < K)[None, :]
    tl.store(weights_ptr + target, weights * scale, mask=mask)
    tl.store(experts_ptr + target, experts, mask=mask)


def moe_gate(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor, config: GateConfig) -> tuple[Tensor, Tensor]:
    """(weights_TK float32, experts_TK int32), best first, ties to the lowest index. `bias_X` is float32."""
    return choose_experts(linear(x_TD, weight_XD, torch.float32), bias_X, config)


def choose_experts(logits_TX: Tensor, bias_X: Tensor, config: GateConfig) -> tuple[Tensor, Tensor]:
    """The same from the router's product, float32 [T, X]."""
    (num_rows, num_experts), k = logits_TX.shape, config.num_experts_per_token
    weights_TK = logits_TX.new_empty(num_rows, k)
    experts_TK = logits_TX.new_empty(num_rows, k, dtype=torch.int32)
    assert logits_TX.is_contiguous() and bias_X.is_contiguous(), logits_TX.stride()
    group_experts = num_experts // config.num_groups
    if num_rows:
        gate_kernel[(triton.cdiv(num_rows, BLOCK_T),)](
            logits_TX, bias_X, weights_TK, experts_TK, num_rows, config.scale, GROUPS=config.num_groups,
            GROUP_EXPERTS=group_experts, GROUPS_KEPT=config.num_groups_kept, K=k, NORMALIZE=config.normalize,
            BLOCK_T=BLOCK_T, BLOCK_G=triton.next_power_of_2(config.num_groups),
            BLOCK_E=triton.next_power_of_2(group_experts), BLOCK_K=triton.next_power_of_2(k), num_warps=4,
            enable_fp_fusion=False,
        )
    return weights_TK, experts_TK
