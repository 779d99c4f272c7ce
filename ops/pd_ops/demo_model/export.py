"""Writes a trained model as a Hugging Face checkpoint: `config.json` and one safetensors file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pd_ops.demo_model.network import DemoModel

_MTP_OWN = re.compile(r"mtp\.(enorm|hnorm|eh_proj)\.")


def checkpoint_tensors(model: DemoModel) -> dict[str, Tensor]:
    """All tensors under their names in a DeepSeek-V3 checkpoint, MTP's copies of embedding and head included: bf16,
    correction biases fp32."""
    mtp = f"model.layers.{model.shape.num_hidden_layers}."
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        name = _MTP_OWN.sub(rf"{mtp}\1.", name)
        name = name.replace("mtp.layer.", mtp).replace("mtp.norm.", f"{mtp}shared_head.norm.")
        if not name.startswith(("model.", "lm_head.")):
            name = f"model.{name}"
        tensors.update(_experts(name, value) if name.endswith(("gate_up_XID", "down_XDI")) else {name: value})
    tensors[f"{mtp}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{mtp}shared_head.head.weight"] = tensors["lm_head.weight"]
    return {name: _stored(name, value) for name, value in tensors.items()}


def _experts(name: str, stack: Tensor) -> dict[str, Tensor]:
    """A stack's matrices under the names of single experts."""
    prefix, _, kind = name.rpartition(".")
    result = {}
    for expert, matrix in enumerate(stack):
        projections = ("gate_proj", "up_proj") if kind == "gate_up_XID" else ("down_proj",)
        for projection, part in zip(projections, matrix.chunk(len(projections)), strict=True):
            result[f"{prefix}.experts.{expert}.{projection}.weight"] = part
    return result


def _stored(name: str, value: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    return value.detach().to(dtype, copy=True).contiguous()


def write_checkpoint(model: DemoModel, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors`."""
    save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(model.shape.config_json(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
