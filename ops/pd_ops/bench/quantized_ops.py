"""FP8 weights with FP8 activations (W8A8), as DeepSeek-V3's own kernels compute: for comparison, on the reference ops.

Everything that is multiplied with an FP8 matrix is rounded to e4m3 first, with a scale a row and 128 numbers
(pd_kernels.fp8_quant). The engine itself multiplies activations as they are (decision 0104).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.elementary.reference import silu
from pd_kernels.fp8_matrix import Fp8Matrix, Weight
from pd_kernels.fp8_quant.reference import dequantize_activations, fp8_quant
from pd_kernels.linear.reference import matmul
from pd_kernels.moe_experts.reference import Experts
from pd_kernels.ops import GateConfig
from pd_kernels.reference import ReferenceOps


@dataclass(frozen=True, slots=True)
class Matrix:
    """A float32 matrix, and whether what it multiplies is quantized."""

    weight: Tensor
    quantized: bool


class QuantizingOps(ReferenceOps):
    """Takes its own packed weights only; experts and MLPs must be FP8."""

    def pack_linear(self, weight_MD: Weight) -> Matrix:  # type: ignore[override]
        return Matrix(super().pack_linear(weight_MD), isinstance(weight_MD, Fp8Matrix))

    def linear(  # type: ignore[override]
        self, x_TD: Tensor, weight: Matrix, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        x = _rounded(x_TD) if weight.quantized else x_TD
        return super().linear(x, weight.weight, out_dtype=torch.float32).to(out_dtype or x_TD.dtype)

    def moe_gate(  # type: ignore[override]
        self, x_TD: Tensor, weight: Matrix, bias_X: Tensor, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        return super().moe_gate(x_TD, weight.weight, bias_X, config)

    def swiglu(self, x_TD: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:  # type: ignore[override]
        return self._expert(x_TD, gate_up.weight, down.weight).to(x_TD.dtype)

    def moe_experts(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Experts, *, shared_scale: float = 1.0
    ) -> Tensor:
        y_TD = torch.zeros(x_TD.shape)
        for index in torch.unique(experts_TK).tolist():
            token, rank = (experts_TK == index).nonzero(as_tuple=True)
            part = self._expert(x_TD[token], experts.gate_up_X2ID[index], experts.down_XDI[index])
            y_TD[token] += part * weights_TK[token, rank].unsqueeze(1)
        if experts.shared_gate_up is not None and experts.shared_down is not None:
            y_TD += self._expert(x_TD, experts.shared_gate_up, experts.shared_down) * shared_scale
        return y_TD.to(x_TD.dtype)

    def _expert(self, x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = matmul(_rounded(x_TD), gate_up, self._min_rows).chunk(2, dim=-1)
        return matmul(_rounded((silu(gate.contiguous()) * up).to(x_TD.dtype)), down, self._min_rows)


def _rounded(x_TD: Tensor) -> Tensor:
    """x as e4m3 holds it, float32."""
    return dequantize_activations(*fp8_quant(x_TD, power_of_two=False))
