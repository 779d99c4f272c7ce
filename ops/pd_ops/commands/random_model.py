"""`pd-relay random-model`: a small checkpoint with random weights, for tests and benchmarks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_engine.errors import InvalidArgument, shown
from pd_ops.commands import options


def command(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Equal seeds give equal weights.")] = 0,
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
    overrides = dict(map(_parse_field, fields or []))
    torch_dtype = _torch_dtype(dtype)
    from pd_engine.model.random_checkpoint import FIELD_NAMES, write_random_checkpoint

    _check_names(overrides, FIELD_NAMES)
    overrides = {"torch_dtype": torch_dtype, **overrides}
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


def _check_names(overrides: Collection[str], known: Collection[str]) -> None:
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
            raise InvalidArgument(f"--set {shown(name)}: config.json has no such field; {hint}")


def _parse_field(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise InvalidArgument(f"--set takes NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"--set {name}: {value[:80]!r} is not JSON") from None
