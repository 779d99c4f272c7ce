"""The main model: embedding, layers, final norm, head. The one definition of it.

Shape suffixes as in pd_kernels.ops: T rows of a step, D hidden, Z vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pd_engine.model.config import ModelConfig
from pd_engine.model.fp16_guard import Fp16Guard, fp16_guard
from pd_engine.model.mla import LayerCache, Mla, StepRows
from pd_engine.model.moe import feed_forward, gate_config
from pd_engine.model.rope import rope_table, softmax_scale
from pd_engine.model.weights import DenseWeights, LayerWeights, ModelWeights
from pd_kernels.ops import GateConfig, Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One decoder layer, main or MTP's, with its additions fused into the norms that follow them."""

    ops: Ops
    mla: Mla
    gate: GateConfig | None
    guard: Fp16Guard
    eps: float

    def run(
        self, normed_TD: Tensor, residual_TD: Tensor, weights: LayerWeights, next_norm: Tensor, step: StepRows,
        cache: LayerCache, on_written: Callable[[], None], *, is_first: bool, num_last: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(`next_norm` of the residual stream behind this layer, that stream).

        Args:
            normed_TD: input_layernorm of the residual stream.
            residual_TD: the residual stream.
            on_written: called when this layer's latents of the step are in the cache.
            is_first: the stream comes from no layer, and the guard has not scaled it yet.
            num_last: only so many rows at the end are wanted; of the others, latents in the cache.
        """
        guard, eps = self.guard, self.guard.eps(self.eps)
        attended_TD = self.mla.attend(normed_TD, weights.attention, step, cache, on_written, num_last)
        if num_last is not None:
            residual_TD = residual_TD[-num_last:]
        normed_TD, residual_TD = self.ops.add_rms_norm(
            attended_TD, residual_TD, weights.post_norm, eps, x_scale=guard.scale,
            residual_scale=guard.scale if is_first else 1.0,
        )
        output_TD = feed_forward(self.ops, normed_TD, weights.mlp, self.gate, shared_scale=guard.scale)
        return self.ops.add_rms_norm(
            output_TD, residual_TD, next_norm, eps,
            x_scale=guard.scale if isinstance(weights.mlp, DenseWeights) else 1.0,
        )


class Transformer:
    """The main model over one set of weights."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops, num_positions: int, dtype: str) -> None:
        """`dtype`: the engine's."""
        self.config = config
        self.weights = weights
        self.ops = ops
        rope_P2R = rope_table(config, num_positions).to(ops.device)
        mla = Mla(ops=ops, config=config, rope_P2R=rope_P2R, scale=softmax_scale(config))
        guard = fp16_guard(config, dtype)
        self.block = Block(
            ops=ops, mla=mla, gate=gate_config(config, guard), guard=guard, eps=config.rms_norm_eps
        )

    def with_ops(self, ops: Ops) -> Transformer:
        """Over the same weights."""
        view = copy.copy(self)
        view.ops = ops
        view.block = replace(self.block, ops=ops, mla=replace(self.block.mla, ops=ops))
        return view

    def forward(
        self, ids_T: Tensor, step: StepRows, caches: Sequence[LayerCache],
        on_written: Callable[[int], None] = lambda layer: None,
    ) -> Tensor:
        """h_TD after the final norm, for tokens ids_T (int64); writes every layer's latents.

        `on_written(layer)` is called when that layer's slots of this step are final.
        """
        residual_TD = self.ops.embed(ids_T, self.weights.embedding_ZD)
        normed_TD = self.ops.rms_norm(residual_TD, self.weights.layers[0].input_norm, self.config.rms_norm_eps)
        following = [layer.input_norm for layer in self.weights.layers[1:]] + [self.weights.final_norm]
        for number, (weights, cache, next_norm) in enumerate(
            zip(self.weights.layers, caches, following, strict=True)
        ):
            normed_TD, residual_TD = self.block.run(
                normed_TD, residual_TD, weights, next_norm, step, cache,
                lambda number=number: on_written(number),  # type: ignore[misc]
                is_first=number == 0,
            )
        return normed_TD

    def logits(self, h_TD: Tensor) -> Tensor:
        """float32 [T, Z] of rows that `forward` or MTP returned."""
        return self.ops.linear(h_TD, self.weights.head, out_dtype=torch.float32)
