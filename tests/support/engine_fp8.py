"""FP8 checkpoints for tests: small ones with ragged blocks of scales, and the plain ones that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pd_engine.model.checkpoint import WEIGHTS_FILE
from pd_engine.model.config import CONFIG_FILE
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.model.tensors import SCALE_SUFFIX
from pd_kernels.fp8_quant.reference import dequantize_weight

# Widths below, at and beyond 128; gate and up, and q_a and kv_a, meet in the middle of a block.
RAGGED: dict[str, Any] = {
    "hidden_size": 200, "intermediate_size": 144, "moe_intermediate_size": 72, "q_lora_rank": 136,
    "kv_lora_rank": 128, "num_hidden_layers": 2,
}


def write_fp8_checkpoint(path: Path, **options: Any) -> Path:
    write_random_checkpoint(path, RAGGED, seed=7, fp8=True, **options)
    return path


def write_plain_copy(source: Path, path: Path) -> Path:
    """The checkpoint in fp32: each FP8 matrix as the numbers that it stands for."""
    shutil.copytree(source, path)
    stored = load_file(source / WEIGHTS_FILE)
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scale = stored.get(name + SCALE_SUFFIX)
        plain[name] = tensor.float() if scale is None else dequantize_weight(tensor, scale)
    save_file(plain, path / WEIGHTS_FILE)
    config = json.loads((source / CONFIG_FILE).read_text()) | {"torch_dtype": "float32"}
    del config["quantization_config"]
    (path / CONFIG_FILE).write_text(json.dumps(config))
    return path


def logits_error(logits: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, over that of the expected logits around their mean."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean()
    return float(((logits - expected).square().mean() / spread).sqrt())


def set_code(codes: Tensor, index: tuple[int, int], code: int) -> None:
    codes.view(torch.uint8)[index] = code
