"""How far an implementation may be from the reference: one table, by op and storage dtype.

Both sides round once from fp32 results that differ by the order of their sums alone. So a float32 result may be off
by a few ulp of the largest term (`relative` to the largest magnitude of the result), and a bfloat16 or float16 result
by that and one rounding (2^-8 or 2^-11 relative; float16's steps never go below 2^-24). Ops that round an intermediate
(the product before `down`) may amplify one flipped rounding of it. Nothing here depends on the machine or on CI.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """|result - reference| <= relative · |reference| + absolute · max |reference|."""

    relative: float
    absolute: float


BF16_ULP = 2.0**-8
FP16_ULP = 2.0**-11
_EXACT = Tolerance(relative=0.0, absolute=0.0)
_FP32_SUM = Tolerance(relative=1e-5, absolute=3e-6)
_BF16_SUM = Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=1e-5)
_BF16_TWO_ROUNDINGS = Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=BF16_ULP / 2)
_FP16_SUM = Tolerance(relative=1.01 * 2 * FP16_ULP, absolute=1e-5)
_FP16_TWO_ROUNDINGS = Tolerance(relative=1.01 * 2 * FP16_ULP, absolute=FP16_ULP / 2)

TOLERANCES: dict[tuple[str, torch.dtype], Tolerance] = {
    ("embed", torch.float32): _EXACT,
    ("embed", torch.bfloat16): _EXACT,
    ("embed", torch.float16): _EXACT,
    ("rms_norm", torch.float32): _FP32_SUM,
    ("rms_norm", torch.bfloat16): _BF16_SUM,
    ("rms_norm", torch.float16): _FP16_SUM,
    ("add_rms_norm", torch.float32): _FP32_SUM,
    ("add_rms_norm", torch.bfloat16): _BF16_SUM,
    ("add_rms_norm", torch.float16): _FP16_SUM,
    ("concat_norms", torch.float32): _FP32_SUM,
    ("concat_norms", torch.bfloat16): _BF16_SUM,
    ("concat_norms", torch.float16): _FP16_SUM,
    ("linear", torch.float32): _FP32_SUM,
    ("linear", torch.bfloat16): _BF16_SUM,
    ("linear", torch.float16): _FP16_SUM,
    ("mla_queries", torch.float32): _FP32_SUM,
    ("mla_queries", torch.bfloat16): _BF16_SUM,
    ("mla_queries", torch.float16): _FP16_SUM,
    ("latent_write", torch.float32): _FP32_SUM,
    ("latent_write", torch.bfloat16): _BF16_SUM,
    ("latent_write", torch.float16): _FP16_SUM,
    ("mla_attention", torch.float32): Tolerance(relative=1e-4, absolute=3e-5),
    ("mla_attention", torch.bfloat16): Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=1e-4),
    ("mla_attention", torch.float16): Tolerance(relative=1.01 * 2 * FP16_ULP, absolute=1e-4),
    ("mla_attention_expanded", torch.float32): Tolerance(relative=1e-4, absolute=3e-5),
    ("mla_attention_expanded", torch.bfloat16): Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=1e-4),
    ("mla_attention_expanded", torch.float16): Tolerance(relative=1.01 * 2 * FP16_ULP, absolute=1e-4),
    ("absorb_values", torch.float32): _FP32_SUM,
    ("absorb_values", torch.bfloat16): _BF16_SUM,
    ("absorb_values", torch.float16): _FP16_SUM,
    ("moe_gate", torch.float32): _FP32_SUM,
    ("moe_gate", torch.bfloat16): _FP32_SUM,
    ("moe_gate", torch.float16): _FP32_SUM,
    ("moe_experts", torch.float32): Tolerance(relative=1e-5, absolute=1e-5),
    ("moe_experts", torch.bfloat16): _BF16_TWO_ROUNDINGS,
    ("moe_experts", torch.float16): _FP16_TWO_ROUNDINGS,
    ("swiglu", torch.float32): Tolerance(relative=1e-5, absolute=1e-5),
    ("swiglu", torch.bfloat16): _BF16_TWO_ROUNDINGS,
    ("swiglu", torch.float16): _FP16_TWO_ROUNDINGS,
    ("logprobs", torch.float32): Tolerance(relative=1e-6, absolute=0.0),
    # Hopper's matrix units cut a float32 sum off, instead of rounding it, after each 16 channels: over 7,168 of them up
    # to 448 · 2^-24 of a partial sum.
    ("linear_on_matrix_units", torch.float32): Tolerance(relative=3e-5, absolute=2e-5),
    ("linear_on_matrix_units", torch.bfloat16): Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=2e-5),
    ("linear_on_matrix_units", torch.float16): Tolerance(relative=1.01 * 2 * FP16_ULP, absolute=2e-5),
    # GPU kernels that round the softmax weights to bf16 before they multiply the values, as matrix units take them:
    # up to 2^-9 of a sum of magnitudes. The expanded form rounds keys and values too.
    ("mla_attention_on_matrix_units", torch.float32): Tolerance(relative=1e-4, absolute=3e-5),
    ("mla_attention_on_matrix_units", torch.bfloat16): Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=BF16_ULP),
    ("mla_attention_on_matrix_units", torch.float16): Tolerance(relative=1.01 * 2 * FP16_ULP, absolute=FP16_ULP),
    ("mla_attention_expanded_on_matrix_units", torch.float32): Tolerance(relative=1e-4, absolute=3e-5),
    ("mla_attention_expanded_on_matrix_units", torch.bfloat16): Tolerance(
        relative=1.01 * 2 * BF16_ULP, absolute=2 * BF16_ULP),
    ("mla_attention_expanded_on_matrix_units", torch.float16): Tolerance(
        relative=1.01 * 2 * FP16_ULP, absolute=2 * FP16_ULP),
    # FP8: both sides see the same e4m3 numbers. A product that is rounded to e4m3 in between may flip a rounding.
    ("fp8_linear", torch.float32): Tolerance(relative=1e-5, absolute=1e-5),
    ("fp8_linear", torch.bfloat16): _BF16_SUM,
    ("fp8_linear", torch.float16): _FP16_SUM,
    # Hopper's FP8 units keep about 13 bits of a sum within 128 channels.
    ("fp8_linear_on_matrix_units", torch.bfloat16): Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=2.0**-10),
    ("fp8_expert", torch.float32): Tolerance(relative=1e-5, absolute=2.0**-7),
    ("fp8_expert", torch.bfloat16): Tolerance(relative=1.01 * 2 * BF16_ULP, absolute=2.0**-7),
    ("fp8_expert", torch.float16): Tolerance(relative=1.01 * 2 * FP16_ULP, absolute=2.0**-7),
    # A latent in FP8: a rounding that the order of the norm's sum flips is a step of e4m3.
    ("latent_write_fp8", torch.bfloat16): Tolerance(relative=2.0**-3, absolute=2.0**-9),
    # A whole model's logits against transformers in float32, by the engine's storage dtype.
    ("logits", torch.float32): Tolerance(relative=0.0, absolute=1e-5),
    ("logits", torch.bfloat16): Tolerance(relative=0.0, absolute=3e-2),
    ("logits", torch.float16): Tolerance(relative=0.0, absolute=4e-3),
}


def check_close(op: str, dtype: torch.dtype, result: Tensor, reference: Tensor) -> None:
    """Raises AssertionError, naming the worst element, if `result` is out of tolerance for that op and dtype.

    Non-finite positions are compared first and must agree exactly.
    """
    assert result.shape == reference.shape, f"{op}: shape {tuple(result.shape)}, reference {tuple(reference.shape)}"
    assert result.dtype == reference.dtype, f"{op}: dtype {result.dtype}, reference {reference.dtype}"
    if result.numel() == 0:
        return
    got, want = result.double().flatten(), reference.double().flatten()
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{op}: non-finite values at other places than the reference"
    if not bool(finite.any()):
        return
    tolerance = TOLERANCES[op, dtype]
    allowed = tolerance.relative * want.abs() + tolerance.absolute * want[finite].abs().max()
    excess = ((got - want).abs() - allowed).nan_to_num(float("-inf"), neginf=float("-inf"))
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"{op} ({dtype}): element {worst} is {got[worst].item()}, reference {want[worst].item()}, "
        f"allowed {allowed[worst].item():.3g}"
    )
