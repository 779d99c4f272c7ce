"""One checkpoint in every precision that the engine computes in: what `pd-relay bench precision` compares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.model.checkpoint import INDEX_FILE, WEIGHTS_FILE, check_tensors, stored_tensors, weight_files
from pd_engine.model.config import CONFIG_FILE, ModelConfig, cache_layout, check_fp8_latents
from pd_engine.model.random_checkpoint import FP8_QUANTIZATION
from pd_engine.model.tensors import QUANTIZED_KINDS, checkpoint_tensors, scale_name
from pd_engine.model.weights import load_weights
from pd_engine.settings import EngineSettings
from pd_kernels.fp8_quant.reference import quantize_weight
from pd_ops.bench.quantized_ops import QuantizingOps

CACHE_MIB, BLOCK_SIZE = 64, 16
FP32, FP8_FP32 = "fp32", "FP8 weights, fp32"  # what others are compared with


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """`exact`: the name of the variant with the same weights in fp32."""

    name: str
    exact: str
    load: Callable[[], Engine]


def variants(model: Path, folder: Path) -> list[Variant]:
    """What can be made of the checkpoint in folder `model`, those that others are compared with first.

    Args:
        folder: for a copy with FP8 weights, if it has none itself.

    Raises:
        InvalidArgument, NotFound: the checkpoint is broken.
    """
    config = ModelConfig.load(model)
    is_fp8 = config.weight_format == "fp8"
    quantized = model
    if not is_fp8:
        quantized = folder / "model"
        write_fp8_copy(model, quantized)
    made = [] if is_fp8 else _in_each_dtype("", FP32, model, has_fp8_latents=_has_fp8_latents(config))
    made += _in_each_dtype("FP8 weights, ", FP8_FP32, quantized, has_fp8_latents=_has_fp8_latents(config))
    name = "FP8 weights and activations (W8A8)"
    made.append(Variant(name=name, exact=FP8_FP32, load=partial(load_quantizing, quantized)))
    return sorted(made, key=lambda variant: variant.name != variant.exact)


def _in_each_dtype(prefix: str, exact: str, path: Path, *, has_fp8_latents: bool) -> list[Variant]:
    return [
        Variant(name=f"{prefix}{dtype}{suffix}", exact=exact, load=partial(load, path, dtype, latents))
        for dtype in ("fp32", "bf16") for suffix, latents in (("", "auto"), (", FP8 latents", "fp8"))
        if has_fp8_latents or latents == "auto"
    ]


def _has_fp8_latents(config: ModelConfig) -> bool:
    try:
        check_fp8_latents(config)
    except InvalidArgument:
        return False
    return True


def write_fp8_copy(source: Path, target: Path) -> None:
    """The checkpoint in folder `source`, of plain weights, with FP8 matrices and in one file."""
    files = weight_files(source)
    skipped = shutil.ignore_patterns(INDEX_FILE, *(file.name for file in files))
    shutil.copytree(source, target, ignore=skipped)
    specs, tensors = checkpoint_tensors(ModelConfig.load(source)), {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                tensor = reader.get_tensor(name)
                if specs[name].kind in QUANTIZED_KINDS:
                    tensor, tensors[scale_name(name)] = quantize_weight(tensor)
                tensors[name] = tensor
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    data = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8")) | {"quantization_config": FP8_QUANTIZATION}
    (target / CONFIG_FILE).write_text(json.dumps(data), encoding="utf-8")


def load(path: Path, dtype: str, latent_dtype: str = "auto") -> Engine:
    settings = EngineSettings.model_validate({"dtype": dtype, "latent_dtype": latent_dtype, "cache_mib": CACHE_MIB})
    return Engine.load(path, settings, max_speculate=0)


def load_quantizing(path: Path) -> Engine:
    """Activations quantized too."""
    config, ops = ModelConfig.load(path), QuantizingOps()
    stored = stored_tensors(path)
    check_tensors(config, stored, with_mtp=False)
    layout = cache_layout(config, "bf16", BLOCK_SIZE, with_mtp=False)
    return Engine(
        config=config, weights=load_weights(config, stored, ops, dtype="bf16", with_mtp=False), ops=ops,
        layout=layout, num_blocks=512, max_context_length=min(8192, config.max_position_embeddings),
        dtype="bf16", prefill_form="absorbed", fingerprint="", load_seconds=0.0,
    )
