"""What every op refuses before it reads a number: arguments of another shape, type, layout or place than `Ops` says.

Kernels are handed addresses and widths; what is wrong there is read from, or written to, somebody else's memory. Each
implementation calls the function of the op's name first. Of a step that is repeated (`pd_kernels.repeat`) they run
once, when it is recorded. Values of indices: see `pd_kernels.index_ranges`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_kernels.fp8_matrix import BLOCK, Fp8Matrix, Weight, problem
from pd_kernels.latent_fp8.reference import GROUP, slot_bytes
from pd_kernels.ops import GateConfig, Rows, SamplingRows

HOST = torch.device("cpu")
MAX_NUMBERS = 2**31 - 1  # of activations in one call: kernels count them in 32 bits

Shape = tuple[int, ...]
Dtypes = frozenset[torch.dtype]
STORAGE: Dtypes = frozenset({torch.bfloat16, torch.float16, torch.float32})
FLOAT32: Dtypes = frozenset({torch.float32})
INT32: Dtypes = frozenset({torch.int32})
INT64: Dtypes = frozenset({torch.int64})
SAMPLING: dict[str, tuple[np.dtype[np.generic], float, float]] = {  # dtype, lowest and highest value
    "temperature_T": (np.dtype(np.float32), 0, float(np.finfo(np.float32).max)),
    "top_k_T": (np.dtype(np.int32), -1, math.inf),
    "top_p_T": (np.dtype(np.float32), 0, 1),
    "min_p_T": (np.dtype(np.float32), 0, 1),
    "seed_T": (np.dtype(np.uint64), 0, math.inf),
    "position_T": (np.dtype(np.int64), 0, math.inf),
}


class WrongArgument(ValueError):
    """An op cannot take an argument; the message says what it is, and what is allowed."""


def whole(what: str, tensor: Tensor, dtypes: Dtypes, shape: Shape, device: torch.device) -> None:
    """A contiguous tensor of that very shape."""
    if not (tensor.dtype in dtypes and tensor.shape == shape and tensor.is_contiguous()
            and _is_on(tensor, device)):
        raise wrong(what, tensor, dtypes, f"{list(shape)}, contiguous", device)


def whole_of(what: str, tensor: Tensor, dtypes: Dtypes, num_dims: int, device: torch.device) -> Shape:
    """A contiguous tensor of so many dims, of which only the first may be empty. Returns its shape."""
    shape = tensor.shape
    if not (tensor.dtype in dtypes and len(shape) == num_dims and 0 not in shape[1:] and tensor.is_contiguous()
            and _is_on(tensor, device)):
        raise wrong(what, tensor, dtypes, f"of {num_dims} dims, none empty but the first, contiguous", device)
    return shape


def rows_of(what: str, tensor: Tensor, dtypes: Dtypes, width: int, device: torch.device) -> int:
    """Rows of activations, [T, width]: each row contiguous, wherever the next one is. Returns T."""
    shape = (*tensor.shape[:1], width)
    if not (tensor.dtype in dtypes and tensor.shape == shape and (tensor.stride(1) == 1 or width == 1)
            and _is_on(tensor, device) and shape[0] * width <= MAX_NUMBERS):
        raise wrong(what, tensor, dtypes, f"[T, {width}], each row contiguous, at most {MAX_NUMBERS} numbers", device)
    return shape[0]


def wrong(what: str, tensor: Tensor, dtypes: Dtypes, wanted: str, device: torch.device) -> WrongArgument:
    """The error that says what a tensor is, and what is allowed."""
    return WrongArgument(
        f"{what} must be {_names(dtypes)} {wanted}, on {device}; got {tensor.dtype} {list(tensor.shape)}, strides "
        f"{tensor.stride()}, {_where(tensor)}")


def on_device(what: str, tensor: Tensor, dtypes: Dtypes, device: torch.device) -> None:
    """Of any shape and layout."""
    if not (tensor.dtype in dtypes and _is_on(tensor, device)):
        raise wrong(what, tensor, dtypes, "of any layout", device)


def embed(ids_T: Tensor, table_ZD: Tensor, device: torch.device) -> None:
    whole_of("embed: ids_T", ids_T, INT64, 1, device)
    whole_of("embed: table_ZD", table_ZD, STORAGE, 2, device)


def rms_norm(x_TD: Tensor, weight_D: Tensor, device: torch.device) -> None:
    [D] = whole_of("rms_norm: weight_D", weight_D, FLOAT32, 1, device)
    rows_of("rms_norm: x_TD", x_TD, STORAGE, D, device)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, device: torch.device) -> None:
    [D] = whole_of("add_rms_norm: weight_D", weight_D, FLOAT32, 1, device)
    rows_of("add_rms_norm: x_TD", x_TD, STORAGE, D, device)
    _beside("add_rms_norm: residual_TD", residual_TD, x_TD, device)


def concat_norms(a_TD: Tensor, a_weight_D: Tensor, b_TD: Tensor, b_weight_D: Tensor, device: torch.device) -> None:
    [D] = whole_of("concat_norms: a_weight_D", a_weight_D, FLOAT32, 1, device)
    whole("concat_norms: b_weight_D", b_weight_D, FLOAT32, (D,), device)
    rows_of("concat_norms: a_TD", a_TD, STORAGE, D, device)
    _beside("concat_norms: b_TD", b_TD, a_TD, device)


def linear(x_TD: Tensor, num_inputs: int, out_dtype: torch.dtype | None, device: torch.device) -> None:
    rows_of("linear: x_TD", x_TD, STORAGE, num_inputs, device)
    if out_dtype not in (None, x_TD.dtype, torch.float32):
        raise WrongArgument(f"linear: out_dtype must be that of x_TD, {x_TD.dtype}, or torch.float32; got {out_dtype}")


def mla_queries(q_TF: Tensor, num_heads: int, nope_width: int, rope_P2R: Tensor, positions_T: Tensor,
                device: torch.device) -> None:
    R = rope_width("mla_queries", rope_P2R, device)
    T = rows_of("mla_queries: q_TF", q_TF, STORAGE, num_heads * (nope_width + R), device)
    whole("mla_queries: positions_T", positions_T, INT32, (T,), device)


def latent_write(kv_TE: Tensor, norm_weight_C: Tensor, rope_P2R: Tensor, rows: Rows, cache_GKE: Tensor,
                 device: torch.device) -> None:
    R = rope_width("latent_write", rope_P2R, device)
    [C] = whole_of("latent_write: norm_weight_C", norm_weight_C, FLOAT32, 1, device)
    T = rows_of("latent_write: kv_TE", kv_TE, STORAGE, C + R, device)
    whole("latent_write: rows.positions_T", rows.positions_T, INT32, (T,), device)
    whole("latent_write: rows.slots_T", rows.slots_T, INT64, (T,), device)
    cache("latent_write", cache_GKE, kv_TE.dtype, C, R, device)


def mla_attention(q_THE: Tensor, cache_GKE: Tensor, rows: Rows, first_position: int, latent_width: int,
                  device: torch.device) -> None:
    T, H, E = whole_of("mla_attention: q_THE", q_THE, STORAGE, 3, device)
    if not 0 < latent_width <= E or T * H * E > MAX_NUMBERS:
        raise WrongArgument(f"mla_attention: latent_width must be within 1 to {E}, the width of q_THE, which may have "
                            f"{MAX_NUMBERS} numbers; got {latent_width} and {T * H * E} numbers")
    cache("mla_attention", cache_GKE, q_THE.dtype, latent_width, E - latent_width, device)
    _context("mla_attention", rows, T, first_position, device)


def mla_attention_expanded(q_TF: Tensor, num_heads: int, nope_width: int, latent_width: int, rope_P2R: Tensor,
                           cache_GKE: Tensor, rows: Rows, first_position: int, device: torch.device) -> None:
    R = rope_width("mla_attention_expanded", rope_P2R, device)
    T = rows_of("mla_attention_expanded: q_TF", q_TF, STORAGE, num_heads * (nope_width + R), device)
    cache("mla_attention_expanded", cache_GKE, q_TF.dtype, latent_width, R, device)
    _context("mla_attention_expanded", rows, T, first_position, device)


def absorb_values(o_THC: Tensor, num_heads: int, latent_width: int, device: torch.device) -> None:
    whole("absorb_values: o_THC", o_THC, STORAGE, (*o_THC.shape[:1], num_heads, latent_width), device)


def moe_gate(x_TD: Tensor, num_experts: int, num_inputs: int, bias_X: Tensor, config: GateConfig,
             device: torch.device) -> None:
    rows_of("moe_gate: x_TD", x_TD, STORAGE, num_inputs, device)
    whole("moe_gate: bias_X", bias_X, FLOAT32, (num_experts,), device)
    groups, kept, chosen = config.num_groups, config.num_groups_kept, config.num_experts_per_token
    if not (0 < kept <= groups and num_experts % groups == 0 and 0 < chosen <= num_experts // groups * kept):
        raise WrongArgument(f"moe_gate: {num_experts} experts must be in equal groups, and those of the kept ones be "
                            f"enough; got {groups} groups, {kept} kept, {chosen} experts a token")


def moe_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_inputs: int, device: torch.device) -> None:
    T = rows_of("moe_experts: x_TD", x_TD, STORAGE, num_inputs, device)
    whole("moe_experts: experts_TK", experts_TK, INT32, (T, *experts_TK.shape[1:2]), device)
    whole("moe_experts: weights_TK", weights_TK, FLOAT32, experts_TK.shape, device)
    if experts_TK.dim() != 2 or experts_TK.shape[1] == 0:
        raise WrongArgument(f"moe_experts: each row must have an expert at least; got {tuple(experts_TK.shape)}")


def swiglu(x_TD: Tensor, gate_up: Shape, down: Shape, device: torch.device) -> None:
    """`gate_up`, `down`: (outputs, inputs) of either weight."""
    D = gate_up[1]
    rows_of("swiglu: x_TD", x_TD, STORAGE, D, device)
    if gate_up != (2 * down[1], D) or down[0] != D:
        raise WrongArgument(f"swiglu: weights must be [2·I, {D}] and [{D}, I]; got {list(gate_up)} and {list(down)}")


def sampling(logits_TZ: Tensor, rows: SamplingRows, device: torch.device) -> None:
    logits("sample", logits_TZ, device)
    for name, (dtype, lowest, highest) in SAMPLING.items():
        values: npt.NDArray[np.generic] = getattr(rows, name)
        if not isinstance(values, np.ndarray):
            raise WrongArgument(f"sample: rows.{name} must be an array of numpy; got a {type(values).__name__}")
        if values.dtype != dtype or values.shape != logits_TZ.shape[:1] or not values.flags.c_contiguous:
            raise WrongArgument(f"sample: rows.{name} must be {dtype} [{logits_TZ.shape[0]}], contiguous; "
                                f"got {values.dtype} {list(values.shape)}, strides in bytes {values.strides}")
        if not all(lowest <= value <= highest for value in values.tolist()):  # NaN is not; few rows: numpy is slower
            raise WrongArgument(f"sample: rows.{name} must be within {lowest} to {highest}; got {values.tolist()}")


def logits(op: str, logits_TZ: Tensor, device: torch.device) -> None:
    whole_of(f"{op}: logits_TZ", logits_TZ, FLOAT32, 2, device)


def cache(op: str, cache_GKE: Tensor, dtype: torch.dtype, latent_width: int, rope_width: int,
          device: torch.device) -> None:
    """Slots of these widths, in FP8 or in the dtype of the activations."""
    is_fp8 = cache_GKE.dtype is torch.uint8
    if is_fp8 and latent_width % GROUP:
        raise WrongArgument(f"{op}: FP8 slots hold latents in whole groups of {GROUP}; got {latent_width}")
    width = slot_bytes(latent_width, rope_width) if is_fp8 else latent_width + rope_width
    whole(f"{op}: cache_GKE", cache_GKE, frozenset({dtype, torch.uint8}), (*cache_GKE.shape[:2], width), device)
    if cache_GKE.shape[1] == 0:
        raise WrongArgument(f"{op}: blocks must have a slot at least; got {list(cache_GKE.shape)}")


def rope_width(op: str, rope_P2R: Tensor, device: torch.device) -> int:
    """The numbers that the table turns, two an angle."""
    P, two, half = whole_of(f"{op}: rope_P2R", rope_P2R, FLOAT32, 3, device)
    if two != 2:
        raise WrongArgument(f"{op}: rope_P2R must be [P, 2, R/2], cosines and sines; got {[P, two, half]}")
    return 2 * half


def _beside(what: str, tensor: Tensor, other: Tensor, device: torch.device) -> None:
    """As many rows as the other's, of the same width and dtype."""
    if rows_of(what, tensor, frozenset({other.dtype}), other.shape[1], device) != other.shape[0]:
        raise WrongArgument(f"{what} must have {other.shape[0]} rows; got {tensor.shape[0]}")


def _context(op: str, rows: Rows, T: int, first_position: int, device: torch.device) -> None:
    whole(f"{op}: rows.positions_T", rows.positions_T, INT32, (T,), device)
    whole(f"{op}: rows.sequence_T", rows.sequence_T, INT32, (T,), device)
    whole(f"{op}: rows.block_tables_SB", rows.block_tables_SB, INT32, rows.block_tables_SB.shape, device)
    if rows.block_tables_SB.dim() != 2:
        raise WrongArgument(f"{op}: rows.block_tables_SB must be [S, B]; got {list(rows.block_tables_SB.shape)}")
    if not 0 <= first_position <= MAX_NUMBERS:
        raise WrongArgument(f"{op}: first_position must not be below 0; got {first_position}")


def linear_weight(weight_MD: Weight, device: torch.device) -> None:
    _weight("pack_linear: weight_MD", weight_MD, 2, device)


def absorbed_weights(w_uk_HNC: Tensor, w_uv_HVC: Tensor, device: torch.device) -> None:
    _weight("pack_absorbed: w_uk_HNC", w_uk_HNC, 3, device)
    _weight("pack_absorbed: w_uv_HVC", w_uv_HVC, 3, device)
    (H, _, C), (other_H, _, other_C) = w_uk_HNC.shape, w_uv_HVC.shape
    if (H, C, w_uk_HNC.dtype) != (other_H, other_C, w_uv_HVC.dtype):
        raise WrongArgument(f"pack_absorbed: both halves must have the same heads, latent width and dtype; got "
                            f"{w_uk_HNC.dtype} {list(w_uk_HNC.shape)} and {w_uv_HVC.dtype} {list(w_uv_HVC.shape)}")


def expert_weights(gate_up_X2ID: Weight, down_XDI: Weight, shared_gate_up: Weight | None,
                   shared_down: Weight | None, device: torch.device) -> None:
    _weight("pack_experts: gate_up_X2ID", gate_up_X2ID, 3, device)
    _weight("pack_experts: down_XDI", down_XDI, 3, device)
    pairs = [(gate_up_X2ID, down_XDI)]
    if shared_gate_up is not None and shared_down is not None:
        _weight("pack_experts: shared_gate_up", shared_gate_up, 2, device)
        _weight("pack_experts: shared_down", shared_down, 2, device)
        pairs.append((shared_gate_up, shared_down))
    elif shared_gate_up is not shared_down:
        raise WrongArgument("pack_experts: the shared expert needs both its weights, or there is none")
    X, D, _ = down_XDI.shape
    for up, down in pairs:
        if up.shape != (*([X] if len(up.shape) == 3 else []), 2 * down.shape[-1], D) or down.shape[-2] != D:
            raise WrongArgument(f"pack_experts: weights must be [2·I, {D}] and [{D}, I] of each of {X} experts; got "
                                f"{list(up.shape)} and {list(down.shape)}")
    if len({_format(part) for pair in pairs for part in pair}) > 1:
        raise WrongArgument("pack_experts: all experts must be of one dtype, or all FP8")


def _weight(what: str, weight: Weight, dim: int, device: torch.device) -> None:
    """A matrix, or a stack of them, that is not empty; on the host, or where the ops are."""
    shape = weight.shape
    if len(shape) != dim or 0 in shape or not (isinstance(weight, Fp8Matrix) or weight.dtype in STORAGE):
        raise WrongArgument(f"{what} must be FP8 or {_names(STORAGE)}, {dim} dims, none empty; got {_format(weight)} "
                            f"{list(shape)}")
    if isinstance(weight, Fp8Matrix) and (
            weight.codes_MK.dtype is not torch.float8_e4m3fn or weight.scales_Mg.dtype is not torch.float32
            or weight.scales_Mg.shape != (*shape[:-1], -(-shape[-1] // BLOCK))):
        raise WrongArgument(f"{what} must be e4m3 with float32 scales, one a row and {BLOCK} inputs; got "
                            f"{weight.codes_MK.dtype} {list(shape)} with {weight.scales_Mg.dtype} "
                            f"{list(weight.scales_Mg.shape)}")
    for part in (weight.codes_MK, weight.scales_Mg) if isinstance(weight, Fp8Matrix) else (weight,):
        if not (_is_on(part, device) or _is_on(part, HOST)):
            raise WrongArgument(f"{what} must be on {device}, not negated; got {_where(part)}")
    if isinstance(weight, Fp8Matrix) and (unusable := problem(weight.codes_MK, weight.scales_Mg)):
        raise WrongArgument(f"{what}: {unusable}")


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """There, and its memory holds its numbers: that of a negated view holds their opposites."""
    return tensor.device.type == device.type and not tensor.is_neg()


def _where(tensor: Tensor) -> str:
    return f"on {tensor.device}{', negated' if tensor.is_neg() else ''}"


def _format(weight: Weight) -> str:
    return "FP8" if isinstance(weight, Fp8Matrix) else str(weight.dtype)


def _names(dtypes: Dtypes) -> str:
    return " or ".join(sorted(str(dtype) for dtype in dtypes))
