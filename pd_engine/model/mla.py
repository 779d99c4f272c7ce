"""Multi-head latent attention (DeepSeek-V2 report, section 2.1; deepseek_v3.md §3.1 and §3.3).

One fused projection gives the low-rank queries and the raw latent; the latent is normed, its rope key is rotated, and
both are written to the cache; attention then reads them back from there, in the absorbed form for every row unless the
step says that some rows take the expanded one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pd_engine.model.config import LATENT_NORM_EPS, ModelConfig
from pd_engine.model.weights import AttentionWeights
from pd_kernels.ops import Ops, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSubset:
    """Some rows of a step: their indices (int64), and the same rows as `Rows`."""

    indices: Tensor
    rows: Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The rows of one step, and which of them attend in which form. Without `expanded`, all are absorbed."""

    rows: Rows
    absorbed: RowSubset | None = None
    expanded: RowSubset | None = None

    def last(self, count: int) -> StepRows:
        """The last rows, of a step that is all absorbed."""
        assert self.expanded is None, "these rows attend in both forms"
        rows = self.rows
        return StepRows(rows=Rows(
            positions_T=rows.positions_T[-count:], sequence_T=rows.sequence_T[-count:],
            block_tables_SB=rows.block_tables_SB, slots_T=rows.slots_T[-count:],
        ))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """One layer's component of the arena: [num_blocks, block_size, E]."""

    slots_GKE: Tensor
    first_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mla:
    """What all layers share: widths, the table of angles and the softmax scale."""

    ops: Ops
    config: ModelConfig
    rope_P2R: Tensor
    scale: float

    def attend(
        self, x_TD: Tensor, weights: AttentionWeights, step: StepRows, cache: LayerCache,
        on_written: Callable[[], None], num_last: int | None = None,
    ) -> Tensor:
        """The attention output y_TD, or that of the last rows only. Calls `on_written` when the latents of all rows are
        in the cache."""
        ops = self.ops
        q_TF = self.write(x_TD, weights, step.rows, cache)
        on_written()
        if num_last is not None:
            q_TF, step = q_TF[-num_last:], step.last(num_last)
        if weights.q_b is not None:
            assert weights.q_a_norm is not None
            q_TF = ops.linear(ops.rms_norm(q_TF, weights.q_a_norm, LATENT_NORM_EPS), weights.q_b)
        return ops.linear(self._values(q_TF, weights, step, cache), weights.o)

    def write(self, x_TD: Tensor, weights: AttentionWeights, rows: Rows, cache: LayerCache) -> Tensor:
        """Writes the latents of all rows, which depend on `x_TD` alone. Returns what the queries are made of: low-rank
        ones, or whole ones where the model has none."""
        fused_TF = self.ops.linear(x_TD, weights.qkv_a)
        kv_start = fused_TF.shape[1] - self.config.cache_width
        self.ops.latent_write(
            fused_TF[:, kv_start:], weights.kv_a_norm, LATENT_NORM_EPS, self.rope_P2R, rows, cache.slots_GKE
        )
        return fused_TF[:, :kv_start]

    def _values(self, q_TF: Tensor, weights: AttentionWeights, step: StepRows, cache: LayerCache) -> Tensor:
        """Attended values, heads side by side: [T, H·V]."""
        if step.expanded is None:
            return self._absorbed(q_TF, weights, step.rows, cache)
        expanded = self._expanded(q_TF[step.expanded.indices], weights, step.expanded.rows, cache)
        if step.absorbed is None:
            return expanded
        absorbed = self._absorbed(q_TF[step.absorbed.indices], weights, step.absorbed.rows, cache)
        values = expanded.new_empty(q_TF.shape[0], expanded.shape[1])
        values[step.expanded.indices] = expanded
        values[step.absorbed.indices] = absorbed
        return values

    def _absorbed(self, q_TF: Tensor, weights: AttentionWeights, rows: Rows, cache: LayerCache) -> Tensor:
        ops = self.ops
        q_THE = ops.mla_queries(q_TF, weights.kv_b, self.rope_P2R, rows.positions_T)
        o_THC = ops.mla_attention(
            q_THE, cache.slots_GKE, rows, self.scale, cache.first_position, self.config.kv_lora_rank
        )
        return ops.absorb_values(o_THC, weights.kv_b)

    def _expanded(self, q_TF: Tensor, weights: AttentionWeights, rows: Rows, cache: LayerCache) -> Tensor:
        return self.ops.mla_attention_expanded(
            q_TF, weights.kv_b, self.rope_P2R, cache.slots_GKE, rows, self.scale, cache.first_position
        )
