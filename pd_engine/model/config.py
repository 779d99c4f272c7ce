"""config.json of the DeepSeek-V3 family, parsed and checked once. Torch-free: the router reads it too.

Field names are Hugging Face's. A field that changes the arithmetic and has a value that this engine does not compute is
refused by name; fields that do not (initializer_range, use_cache, ...) are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pd_engine.bounded_file import read_bounded
from pd_engine.cache.layout import (
    FP8_GROUP,
    FP8_LAYOUT_VERSION,
    LAYOUT_VERSION,
    CacheLayout,
    Component,
    ComponentKind,
    fp8_slot_bytes,
)
from pd_engine.errors import InvalidArgument, NotFound

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
ARCHITECTURE = "DeepseekV3ForCausalLM"
LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm: DeepSeek's own code takes it whatever rms_norm_eps says

Width = Annotated[int, Field(ge=1, le=1 << 20)]
Count = Annotated[int, Field(ge=1, le=1 << 16)]


class YarnScaling(BaseModel):
    """`rope_scaling` of type yarn (deepseek_v3.md §3.2; arXiv 2309.00071, section 3.2)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    factor: float = Field(ge=1, le=1e6)
    original_max_position_embeddings: int = Field(ge=1, le=1 << 30)
    beta_fast: float = Field(32.0, gt=0)
    beta_slow: float = Field(1.0, gt=0)
    mscale: float = Field(1.0, ge=0, le=100)
    mscale_all_dim: float = Field(0.0, ge=0, le=100)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast must be >= beta_slow, got {self.beta_fast} < {self.beta_slow}")
        if not self.mscale_all_dim and self.mscale != 1:
            raise ValueError(f"mscale must be 1 where mscale_all_dim is 0 or absent, got {self.mscale}")
        return self


class ModelConfig(BaseModel):
    """The architecture of one checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    model_type: Literal["deepseek_v3"]
    vocab_size: int = Field(ge=2, le=1 << 24)
    hidden_size: Width
    num_hidden_layers: int = Field(ge=1, le=4096)
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    q_lora_rank: Width | None
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: int = Field(ge=2, le=1 << 16, multiple_of=2)
    v_head_dim: Width
    intermediate_size: Width
    max_position_embeddings: int = Field(ge=2, le=1 << 30)
    rms_norm_eps: float = Field(1e-6, gt=0, lt=1)
    rope_theta: float = Field(10000.0, gt=1, le=1e12)
    rope_scaling: YarnScaling | None = None
    dtype: Literal["bfloat16", "float32"] | None = None
    weight_format: Literal["plain", "fp8"] = "plain"

    first_k_dense_replace: int = Field(0, ge=0, le=4096)
    n_routed_experts: int | None = Field(None, ge=1, le=1 << 16)
    n_shared_experts: int = Field(0, ge=0, le=1024)
    moe_intermediate_size: Width | None = None
    num_experts_per_tok: Count | None = None
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = Field(1.0, gt=0, le=1e6)
    num_nextn_predict_layers: int = Field(0, ge=0, le=1)

    # Only these values are computed; the fields are here so that others are refused.
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    rope_interleave: Literal[True] = True
    tie_word_embeddings: Literal[False] = False

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """The config of the checkpoint in folder `path`.

        Raises:
            NotFound: there is no such folder, or no config.json in it.
            InvalidArgument: it is no JSON object, or a field is missing, has a wrong type, is out of range or asks for
                something that is not supported; the message names the fields, their values and what is allowed.
        """
        return cls.parse(_read_json_object(path / CONFIG_FILE))

    @classmethod
    def parse(cls, data: dict[str, Any]) -> ModelConfig:
        """Like `load`, from a parsed config.json. Raises InvalidArgument."""
        try:
            return cls.model_validate(_normalize(data))
        except ValidationError as error:
            problems = "; ".join(_explain(item) for item in error.errors()[:10])
            raise InvalidArgument(f"{CONFIG_FILE}: {problems}") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads must equal num_attention_heads ({self.num_attention_heads}), "
                f"got {self.num_key_value_heads}"
            )
        if self.n_routed_experts is not None:
            self._check_experts(self.n_routed_experts)
        return self

    def _check_experts(self, num_experts: int) -> None:
        for name in ("moe_intermediate_size", "num_experts_per_tok"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is required beside n_routed_experts")
        if num_experts % self.n_group or (self.n_group > 1 and num_experts // self.n_group < 2):
            raise ValueError(
                f"n_group must divide n_routed_experts ({num_experts}) into groups of at least 2, got {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group must be <= n_group ({self.n_group}), got {self.topk_group}")
        reachable = num_experts // self.n_group * self.topk_group
        if self.num_experts_per_token > reachable:
            raise ValueError(
                f"num_experts_per_tok must be <= the {reachable} experts of topk_group groups, "
                f"got {self.num_experts_per_token}"
            )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers a token and layer in the cache: the latent and the shared rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_experts_per_token(self) -> int:
        assert self.num_experts_per_tok is not None
        return self.num_experts_per_tok

    @property
    def has_mtp(self) -> bool:
        return self.num_nextn_predict_layers > 0

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts. MTP's layer, number `num_hidden_layers`, has them if the checkpoint has any."""
        if self.n_routed_experts is None:
            return False
        return layer >= self.first_k_dense_replace or layer >= self.num_hidden_layers


def check_fp8_latents(config: ModelConfig) -> None:
    """Raises:
    InvalidArgument: the checkpoint's latents do not divide into FP8's groups.
    """
    if config.kv_lora_rank % FP8_GROUP:
        raise InvalidArgument(
            f"settings: engine.latent_dtype: fp8 needs a checkpoint whose kv_lora_rank is a multiple of {FP8_GROUP}, "
            f"this one has {config.kv_lora_rank}"
        )


def check_latent_dtype(config: ModelConfig, dtype: str, latent_dtype: str) -> None:
    """Args:
        dtype: the engine's, "bf16", "fp16" or "fp32".
        latent_dtype: as in the settings.

    Raises:
        InvalidArgument: latents cannot be kept so in an engine of that dtype, or of this checkpoint.
    """
    if latent_dtype != "fp8":
        return
    check_fp8_latents(config)
    if dtype == "fp16":
        raise InvalidArgument(
            "settings: engine.latent_dtype: fp8 does not go with engine.dtype fp16: FP8 latents stand for bf16 "
            "numbers, which fp16 does not hold; take bf16 or fp32"
        )


def cache_layout(config: ModelConfig, dtype: str, block_size: int, with_mtp: bool) -> CacheLayout:
    """One paged component a layer, in layer order, MTP's last. `dtype` is that of the latents: "bf16", "fp16", "fp32"
    or "fp8".

    MTP's slot i holds the latent of (h of position i-1, token i), so its slot 0 is zero and never attended.

    Raises:
        InvalidArgument: see `check_fp8_latents`.
    """
    is_fp8 = dtype == "fp8"
    if is_fp8:
        check_fp8_latents(config)
    width = fp8_slot_bytes(config.kv_lora_rank, config.qk_rope_head_dim) if is_fp8 else config.cache_width
    assert not with_mtp or config.has_mtp, "the checkpoint has no MTP layer"
    names = [(f"layers.{layer}", 0) for layer in range(config.num_hidden_layers)]
    if with_mtp:
        names.append(("mtp.0", 1))
    components = tuple(
        Component(
            name=name, kind=ComponentKind.PAGED, width=width, dtype=dtype, first_position=first_position
        )
        for name, first_position in names
    )
    return CacheLayout(
        block_size=block_size, components=components, version=FP8_LAYOUT_VERSION if is_fp8 else LAYOUT_VERSION
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise NotFound(f"no checkpoint folder {path.parent}")
    try:
        raw = read_bounded(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}") from None
    try:
        data = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON in UTF-8: {error}") from None
    if not isinstance(data, dict):
        raise InvalidArgument(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _normalize(data: dict[str, Any]) -> dict[str, Any]:
    """One spelling for what config.json may spell in several ways. Values are checked later, by the model.

    - dtype | torch_dtype
    - rope_theta and rope_scaling, or both inside rope_parameters (transformers 5)
    - num_nextn_predict_layers | num_mtp_layers
    - null for "absent" where DeepSeek's and transformers' configs write it
    """
    result = dict(data)
    for name, alias in (("dtype", "torch_dtype"), ("num_nextn_predict_layers", "num_mtp_layers")):
        if result.get(name) is None:
            result[name] = result.get(alias)
    rope = result.pop("rope_parameters", None)
    if rope is None:
        rope = result.pop("rope_scaling", None)
    elif result.get("rope_scaling") is not None:
        raise InvalidArgument(f"{CONFIG_FILE}: rope_parameters and rope_scaling are both set; only one is allowed")
    result["rope_scaling"], theta = _split_rope(rope)
    if theta is not None:
        if result.get("rope_theta", theta) != theta:
            raise InvalidArgument(f"{CONFIG_FILE}: rope_theta is set twice, to {result['rope_theta']!r} and {theta!r}")
        result["rope_theta"] = theta
    _check_architectures(result.get("architectures"))
    result["weight_format"] = _weight_format(result.get("quantization_config"))
    return {name: value for name, value in result.items() if value is not None or name == "q_lora_rank"}


def _split_rope(rope: Any) -> tuple[dict[str, Any] | None, Any]:
    """(fields of `YarnScaling` or None without scaling, rope_theta if it is given here)."""
    if rope is None:
        return None, None
    if not isinstance(rope, dict):
        raise InvalidArgument(f"{CONFIG_FILE}: rope_scaling must be an object or null, got {_short(rope)}")
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", None)
    kinds = {name: rope.pop(name) for name in ("type", "rope_type") if name in rope}
    if any(kind not in ("yarn", "default") for kind in kinds.values()) or len(set(kinds.values())) > 1:
        raise InvalidArgument(f"{CONFIG_FILE}: rope_scaling.type must be yarn or default, got {_short(kinds)}")
    if not kinds and rope:
        raise InvalidArgument(f"{CONFIG_FILE}: rope_scaling.type is missing; it must be yarn or default")
    return (rope if "yarn" in kinds.values() else None), theta


def _check_architectures(names: Any) -> None:
    """Many checkpoints do not say; one that does must say this one, whatever its model_type is."""
    if names is not None and not (isinstance(names, list) and ARCHITECTURE in names):
        raise InvalidArgument(
            f"{CONFIG_FILE}: architectures must name {ARCHITECTURE} or be absent, got {_short(names)}"
        )


# Fields of quantization_config and what they may be. Others change nothing here: `scale_fmt` is about activations, and
# whether the FP8 matrices are those that DeepSeek-V3 has is seen in the files.
_QUANTIZATION: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",), "fmt": ("e4m3", None), "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic", None),
}


def _weight_format(quantization: Any) -> str:
    if quantization is None:
        return "plain"
    if not isinstance(quantization, dict):
        raise InvalidArgument(
            f"{CONFIG_FILE}: quantization_config must be an object with quant_method fp8, got {_short(quantization)}"
        )
    for name, (required, *others) in _QUANTIZATION.items():
        value = quantization.get(name)
        if value != required and value not in others:
            raise InvalidArgument(f"{CONFIG_FILE}: quantization_config.{name} must be {required}, got {_short(value)}")
    return "fp8"


def _explain(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{name} is missing"
    return f"{name}: {message}, got {_short(error['input'])}" if name else message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
