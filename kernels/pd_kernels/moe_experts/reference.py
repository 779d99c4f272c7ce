"""Expert(x) = down(silu(gate x) · up x) for routed experts, the shared expert and the dense MLP alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.elementary.reference import silu
from pd_kernels.linear.reference import matmul


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """float32 copies: gate_up_X2ID, down_XDI, and those of the shared expert or None."""

    gate_up_X2ID: Tensor
    down_XDI: Tensor
    shared_gate_up: Tensor | None
    shared_down: Tensor | None


def pack_experts(gate_up_X2ID: Tensor, down_XDI: Tensor, shared_gate_up: Tensor | None,
                 shared_down: Tensor | None) -> Experts:
    """fp32 copies."""
    assert (shared_gate_up is None) == (shared_down is None)
    return Experts(
        gate_up_X2ID=gate_up_X2ID.float().contiguous(),
        down_XDI=down_XDI.float().contiguous(),
        shared_gate_up=None if shared_gate_up is None else shared_gate_up.float().contiguous(),
        shared_down=None if shared_down is None else shared_down.float().contiguous(),
    )


def expert(x_TD: Tensor, gate_up: Tensor, down: Tensor, min_rows: int) -> Tensor:
    """down(silu(gate x) · up x): float32 [T, D]; the product is rounded to the dtype of x before `down`."""
    gate, up = matmul(x_TD.float().contiguous(), gate_up, min_rows).chunk(2, dim=-1)
    act = (silu(gate.contiguous()) * up).to(x_TD.dtype)
    return matmul(act.float(), down, min_rows)


def swiglu(x_TD: Tensor, gate_up: Tensor, down: Tensor, min_rows: int) -> Tensor:
    """The dense MLP, rounded once at the end."""
    return expert(x_TD, gate_up, down, min_rows).to(x_TD.dtype)


def moe_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Experts, min_rows: int, *,
                shared_scale: float = 1.0) -> Tensor:
    """y_TD = ((w_0 E_0(x) + w_1 E_1(x)) + ...) + shared_scale · Shared(x): fp32 in rank order, rounded once."""
    num_tokens, num_ranks = experts_TK.shape
    outputs_TKD = x_TD.new_empty(num_tokens, num_ranks, x_TD.shape[1], dtype=torch.float32)
    for index in torch.unique(experts_TK).tolist():
        token, rank = (experts_TK == index).nonzero(as_tuple=True)
        outputs_TKD[token, rank] = expert(x_TD[token], experts.gate_up_X2ID[index], experts.down_XDI[index], min_rows)
    y_TD = outputs_TKD[:, 0] * weights_TK[:, :1]
    for rank in range(1, num_ranks):
        y_TD = y_TD + outputs_TKD[:, rank] * weights_TK[:, rank : rank + 1]
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        y_TD = y_TD + expert(x_TD, experts.shared_gate_up, experts.shared_down, min_rows) * shared_scale
    return y_TD.to(x_TD.dtype)
