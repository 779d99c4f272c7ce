"""The noaux_tc router (DeepSeek-V3 report, section 2.1.2): chosen with the bias, weighted without it."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.elementary.reference import sigmoid
from pd_kernels.linear.reference import matmul
from pd_kernels.ops import GateConfig


def moe_gate(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor, config: GateConfig,
             min_rows: int) -> tuple[Tensor, Tensor]:
    """(weights_TK float32, experts_TK int32), best first, ties to the lowest index.

    s = sigmoid(x W^T), s' = s + bias; groups ranked by the sum of their two largest s' (largest + second); experts
    ranked by s' within the kept groups; weight = s / (Σ of the chosen s in rank order + 1e-20) · scale.
    """
    scores_TX = sigmoid(matmul(x_TD.float().contiguous(), weight_XD, min_rows))
    choice_TX = scores_TX + bias_X.float()
    choice_TgX = choice_TX.view(x_TD.shape[0], config.num_groups, choice_TX.shape[1] // config.num_groups)
    best = choice_TgX.topk(min(2, choice_TgX.shape[-1]), dim=-1).values
    group_scores_Tg = best[..., 0] + best[..., 1] if best.shape[-1] == 2 else best[..., 0]
    kept_groups = _best(group_scores_Tg, config.num_groups_kept)
    dropped = torch.ones_like(group_scores_Tg, dtype=torch.bool).scatter_(1, kept_groups, False)
    choice_TX = choice_TgX.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    experts_TK = _best(choice_TX, config.num_experts_per_token)
    weights_TK = scores_TX.gather(1, experts_TK)
    if config.normalize:
        total_T = weights_TK[:, 0].clone()
        for k in range(1, config.num_experts_per_token):
            total_T = total_T + weights_TK[:, k]
        weights_TK = weights_TK / (total_T + 1e-20).unsqueeze(-1)
    return weights_TK * config.scale, experts_TK.int()


def _best(x: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of the last dim, best first, ties to the lowest index."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :count]
