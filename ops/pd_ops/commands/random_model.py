"""`pd-relay random-model`: a small checkpoint with random weights, for tests and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_engine.errors import InvalidArgument
from pd_ops.commands import options


def command(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: bf16 or fp32.")] = "bf16",
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Field of config.json, as JSON: hidden_size=256. Repeatable."),
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Projections and experts in FP8, as DeepSeek-V3's are.")] = False,
    max_shard_bytes: Annotated[int | None, typer.Option(min=1, help="Cut the weights into shards.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write a tiny DeepSeek-V3 checkpoint with random weights and a byte tokenizer."""
    output = options.start(context, as_json)
    overrides = {"torch_dtype": _torch_dtype(dtype), **dict(map(_parse_field, fields or []))}
    from pd_engine.model.random_checkpoint import write_random_checkpoint

    try:
        config = write_random_checkpoint(path, overrides, seed=seed, max_shard_bytes=max_shard_bytes, fp8=fp8)
    except OSError as error:
        raise InvalidArgument(f"cannot write a checkpoint to {path}: {error.strerror}") from None
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    output.document({"path": str(path), "seed": seed, "num_bytes": num_bytes, "config": config.model_dump(mode="json")})
    output.text(f"wrote {path} ({num_bytes / 2**20:.1f} MiB): {config.num_hidden_layers} layers, "
                f"hidden {config.hidden_size}, {config.num_nextn_predict_layers} MTP layers")


def _torch_dtype(dtype: str) -> str:
    names = {"bf16": "bfloat16", "fp32": "float32"}
    if dtype not in names:
        raise InvalidArgument(f"--dtype must be {' or '.join(names)}, got {dtype!r}")
    return names[dtype]


def _parse_field(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise InvalidArgument(f"--set takes NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"--set {name}: {value[:80]!r} is not JSON") from None
