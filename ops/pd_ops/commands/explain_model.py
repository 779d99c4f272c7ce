"""`pd-relay explain-model`: what a checkpoint computes, stage by stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from pd_engine.explain import Explanation, explain_model
from pd_engine.model.checkpoint import check_tensors, checkpoint_dtype, resolve_model, stored_tensors
from pd_engine.model.config import ModelConfig
from pd_engine.settings import load_settings
from pd_ops.commands import options
from pd_ops.tables import mib, si, table

DEFAULT_TOKENS = 1024


def command(
    context: typer.Context,
    model: options.Model = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = DEFAULT_TOKENS,
    dtype: options.Dtype = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Print the stages of the forward pass in order: shapes, dtypes, weights and FLOPs."""
    output = options.start(context, as_json)
    settings = load_settings(config, options.overrides(model=model, engine__dtype=dtype))
    path = resolve_model(settings.model)
    architecture = ModelConfig.load(path)
    stored = stored_tensors(path)
    check_tensors(architecture, stored)
    used_dtype = settings.engine.dtype
    dtype_name = checkpoint_dtype(architecture, stored) if used_dtype == "auto" else used_dtype
    explanation = explain_model(
        architecture, num_tokens=tokens, dtype=dtype_name, prefill_form=settings.engine.prefill_form,
        latent_dtype=settings.engine.latent_dtype,
    )
    output.document({"model": str(path), **asdict(explanation)})
    output.text(f"{path}\n{_text(explanation)}")


def _text(explanation: Explanation) -> str:
    columns = ("part", "stage", "layers", "output", "weights", "bytes", "prompt", "token")
    rows = [
        (stage.part, stage.name, stage.repeats, stage.output, si(stage.parameters), si(stage.weight_bytes),
         si(stage.prompt_flops), si(stage.token_flops))
        for stage in explanation.stages
    ]
    formats = explanation.dtype if explanation.weight_format == "plain" else f"{explanation.dtype} and FP8"
    lines = [
        table(columns, rows),
        "weights, bytes and FLOPs are of one layer of each row",
        f"main model: {si(explanation.parameters)} weights, {si(explanation.active_parameters)} active a token; "
        f"prompt of {explanation.num_tokens} tokens {si(explanation.prompt_flops)} FLOPs, one token at that context "
        f"{si(explanation.token_flops)}",
        f"MTP layer: {si(explanation.mtp_parameters)} weights; prompt {si(explanation.mtp_prompt_flops)} FLOPs, one "
        f"token {si(explanation.mtp_token_flops)}",
        f"all weights in {formats}: {mib(explanation.weight_bytes)}; cache: "
        f"{explanation.cache_bytes_per_token} bytes a token",
    ]
    if explanation.residual_factor != 1:
        lines.append(
            f"fp16: the residual stream is kept {explanation.residual_factor:g} times smaller, between the first norm "
            "and the last"
        )
    return "\n".join(lines)
