"""The feed-forward half of a layer: the dense MLP, or routed experts with the shared one (deepseek_v3.md §3.4)."""

from __future__ import annotations

from torch import Tensor

from pd_engine.model.config import ModelConfig
from pd_engine.model.fp16_guard import Fp16Guard
from pd_engine.model.weights import DenseWeights, MoeWeights
from pd_kernels.ops import GateConfig, Ops


def gate_config(config: ModelConfig, guard: Fp16Guard) -> GateConfig | None:
    """How tokens choose experts, whose sum is as much smaller as the guard says; None for a model without any."""
    if config.n_routed_experts is None:
        return None
    return GateConfig(
        num_groups=config.n_group,
        num_groups_kept=config.topk_group,
        num_experts_per_token=config.num_experts_per_token,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor / guard.factor,
    )


def feed_forward(
    ops: Ops, x_TD: Tensor, weights: DenseWeights | MoeWeights, gate: GateConfig | None, *, shared_scale: float
) -> Tensor:
    """y_TD of the layer's MLP, the residual not yet added. `shared_scale`: of a shared expert's output."""
    if isinstance(weights, DenseWeights):
        return ops.swiglu(x_TD, weights.gate_up, weights.down)
    assert gate is not None
    weights_TK, experts_TK = ops.moe_gate(x_TD, weights.gate, weights.bias_X, gate)
    return ops.moe_experts(x_TD, weights_TK, experts_TK, weights.experts, shared_scale=shared_scale)
