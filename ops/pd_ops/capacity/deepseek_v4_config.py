"""config.json of DeepSeek-V4, as far as it decides about bytes; Pro's and Flash's (deepseek_v4.md §1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import InvalidArgument
from pd_engine.model.config import CONFIG_FILE, MAX_CONFIG_BYTES
from pd_ops.capacity.architecture import Published

SLIDING, CSA, HCA = 0, 4, 128  # compress ratios: window only; with entries of 4 tokens and an indexer; of 128 tokens

Width = Annotated[int, Field(ge=1, le=1 << 20)]
Count = Annotated[int, Field(ge=1, le=1 << 16)]


class V4Config(BaseModel):
    """What of config.json decides about bytes. `compress_ratios` has the layers in order, then MTP's."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    model_type: Literal["deepseek_v4"]
    vocab_size: int = Field(ge=2, le=1 << 24)
    hidden_size: Width
    num_hidden_layers: int = Field(ge=1, le=4096)
    num_attention_heads: Count
    head_dim: Width = 512
    qk_rope_head_dim: Width = 64
    q_lora_rank: Width
    o_groups: Count
    o_lora_rank: Width = 1024
    moe_intermediate_size: Width
    n_routed_experts: Count
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: Count
    index_n_heads: Count = 64
    index_head_dim: Width = 128
    index_topk: Width
    compress_ratios: list[Literal[0, 4, 128]]
    num_hash_layers: int = Field(3, ge=0)
    hc_mult: Annotated[int, Field(ge=1, le=64)] = 4
    sliding_window: Width = 128
    max_position_embeddings: int = Field(1 << 20, ge=2, le=1 << 30)
    num_nextn_predict_layers: int = Field(1, ge=0, le=1)
    expert_dtype: Literal["fp4", "fp8"] = "fp4"

    @model_validator(mode="after")
    def _check(self) -> Self:
        layers = self.num_hidden_layers + self.num_nextn_predict_layers
        if len(self.compress_ratios) != layers:
            raise ValueError(f"compress_ratios must have {layers} entries, got {len(self.compress_ratios)}")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups must divide num_attention_heads ({self.num_attention_heads})")
        return self

    def num_layers_of(self, ratio: int) -> int:
        """Of the main model."""
        return sum(one == ratio for one in self.compress_ratios[: self.num_hidden_layers])


PRO: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16, "moe_intermediate_size": 3072,
    "n_routed_experts": 384, "num_experts_per_tok": 6, "index_topk": 1024,
    "compress_ratios": [HCA, HCA, *[CSA, HCA] * 29, CSA, SLIDING],
}
FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 6, "index_topk": 512,
    "compress_ratios": [SLIDING, SLIDING, *[CSA, HCA] * 20, CSA, SLIDING],
}
PRO_PUBLISHED = Published(num_tensors=145_116, num_bytes_gib=805.3)
FLASH_PUBLISHED = Published(num_tensors=69_187, num_bytes=159_609_485_896)


def load_v4(path: Path) -> V4Config:
    """Of a checkpoint's folder. Raises InvalidArgument, with the fields that are wrong."""
    try:
        return parse_v4(json.loads(read_bounded(path / CONFIG_FILE, MAX_CONFIG_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path / CONFIG_FILE} cannot be read: {error}") from None


def parse_v4(data: dict[str, Any]) -> V4Config:
    try:
        return V4Config.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'config'}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors()[:10]
        )
        raise InvalidArgument(f"{CONFIG_FILE}: {problems}") from None
