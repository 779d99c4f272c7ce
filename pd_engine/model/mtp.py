"""Multi-token prediction: one extra layer that drafts tokens (DeepSeek-V3 report, section 2.2; deepseek_v3.md §4).

Row i takes (h of position i-1, token i), stands at RoPE position i, writes slot i of its own cache component, and
predicts token i+1. A slot so depends on the past only; slot 0 has no h before it, is zero, and is never attended.

A slot holds what goes *into* the layer's attention, so it needs neither attention nor experts: rows that only have to
be remembered, as those of a prompt, cost a small part of those that draft (`write_slots`).

A second draft continues from the first: h is then this layer's own output after shared_head.norm, the choice of
transformers and SGLang (vLLM chains before that norm; only acceptance can differ). Slots written from such states are
approximate, and are written again from true states before any later row reads them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pd_engine.model.mla import LayerCache, StepRows
from pd_engine.model.transformer import Transformer
from pd_engine.model.weights import MtpWeights
from pd_kernels.ops import Rows


class Mtp:
    """The MTP layer over the main model's embedding and head."""

    def __init__(self, main: Transformer, weights: MtpWeights) -> None:
        self._main = main
        self._weights = weights

    def over(self, main: Transformer) -> Mtp:
        """The same weights over another view of the main model."""
        return Mtp(main, self._weights)

    def forward(
        self, ids_T: Tensor, previous_TD: Tensor, step: StepRows, cache: LayerCache,
        on_written: Callable[[], None] = lambda: None, *, num_last: int | None = None,
    ) -> Tensor:
        """The layer's output after shared_head.norm, [T, D]: the head makes logits of it, and a next draft takes it as
        its previous state.

        Args:
            ids_T: int64, token i of each row.
            previous_TD: h of position i-1 after the main model's final norm, or this function's own result for it.
            num_last: only that of the last rows is wanted, [num_last, D]; the others write their slots and cost little.
        """
        weights = self._weights
        normed_TD, residual_TD = self._inputs(ids_T, previous_TD)
        return self._main.block.run(
            normed_TD, residual_TD, weights.layer, weights.head_norm, step, cache, on_written, is_first=True,
            num_last=num_last,
        )[0]

    def write_slots(self, ids_T: Tensor, previous_TD: Tensor, rows: Rows, cache: LayerCache) -> None:
        """Writes the slots that `forward` writes, bit for bit, and nothing else."""
        normed_TD, _ = self._inputs(ids_T, previous_TD)
        self._main.block.mla.write(normed_TD, self._weights.layer.attention, rows, cache)

    def _inputs(self, ids_T: Tensor, previous_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(input_layernorm of the residual stream, residual stream) at the layer's beginning."""
        ops, weights, eps = self._main.ops, self._weights, self._main.config.rms_norm_eps
        embedded_TD = ops.embed(ids_T, self._main.weights.embedding_ZD)
        joined = ops.concat_norms(embedded_TD, weights.enorm, previous_TD, weights.hnorm, eps)
        residual_TD = ops.linear(joined, weights.eh_proj)
        return ops.rms_norm(residual_TD, weights.layer.input_norm, eps), residual_TD
