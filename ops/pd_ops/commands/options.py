"""Options that several commands share, defined once."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_engine.errors import InvalidArgument, shown
from pd_engine.priority import MAX_PRIORITY
from pd_ops.cluster.control_messages import MAX_ID_CHARS
from pd_ops.output import Output, redirect_prints
from pd_router.request import MAX_TARGET_MS

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Model = Annotated[str | None, typer.Option(help="Path to a checkpoint, or 'demo' for the shipped one.")]
Config = Annotated[Path | None, typer.Option(help="Settings file (YAML); flags stand over it.")]
Dtype = Annotated[str | None, typer.Option(help="Storage dtype: auto, bf16, fp16 or fp32.")]
ServedDtype = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16 or fp32: the cluster must serve this one; auto: any.")
]
Device = Annotated[str | None, typer.Option(help="Where workers compute: cpu, or cuda for a Hopper GPU.")]
Ops = Annotated[str | None, typer.Option(help="Implementation of the ops: auto, cpu, reference or triton.")]
ServerSpeculate = Annotated[int | None, typer.Option(help="Draft tokens a step at most; 0: off.")]

ClusterName = Annotated[str, typer.Option("--cluster", help="Name of the cluster on this host.")]
Address = Annotated[str | None, typer.Option(help="HOST:PORT of a router's gRPC door; over --cluster.")]
GrpcPort = Annotated[int | None, typer.Option(help="The router's gRPC port on this host; over --cluster.")]

Prompt = Annotated[str | None, typer.Option(help="The prompt.")]
PromptFile = Annotated[Path | None, typer.Option(help="File with the prompt, in UTF-8; '-': standard input.")]
TokenIds = Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is a user's message: apply the chat template.")]
AddBos = Annotated[
    bool | None, typer.Option("--add-bos/--no-add-bos", help="Put BOS first; default: as the tokenizer says.")
]
ParseSpecial = Annotated[
    bool, typer.Option("--parse-special", help="Read special tokens in the prompt as control, not as text.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens to generate at most; default: what fits.")]
Temperature = Annotated[float | None, typer.Option(help="0: greedy; default: as the checkpoint says.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this probability, in (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Keep the K most likely tokens; -1: all.")]
MinP = Annotated[
    float | None, typer.Option(help="Leave out tokens less likely than this share of the most likely one, in [0, 1].")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: tokens of prompt and answer become less likely. In [0.01, 100].")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off the logits of tokens that the answer has. In [-2, 2].")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="The same, as many times as the answer has them. In [-2, 2].")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="ID=BIAS, added to that token's logit, in [-100, 100]; may be given several times.")
]
MinTokens = Annotated[int | None, typer.Option(help="Nothing but --max-tokens ends the answer before so many tokens.")]
Seed = Annotated[int | None, typer.Option(help="All randomness comes from it; default: a random one.")]
NumChoices = Annotated[
    int, typer.Option("-n", "--n", help="Choices, each with a seed of its own that follows from --seed; 1 to 128.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the checkpoint's end tokens.")]
Logprobs = Annotated[int | None, typer.Option(help="Report logprobs, and the N most likely tokens of each position.")]
Speculate = Annotated[
    int | None, typer.Option(help="Draft tokens a step at most; 0: off; default: the server's setting.")
]
Priority = Annotated[
    int, typer.Option(help=f"Lower ones are served earlier; from -{MAX_PRIORITY} to {MAX_PRIORITY}.")
]
User = Annotated[str, typer.Option(help="Whose request it is: users share the room fairly.")]
TtftTargetMs = Annotated[
    int | None, typer.Option(min=1, max=MAX_TARGET_MS, help="Refuse it at once if its first token would come later.")
]
ItlTargetMs = Annotated[
    int | None, typer.Option(min=1, max=MAX_TARGET_MS, help="Between two tokens: wait for a worker that keeps it.")
]
Stream = Annotated[
    bool | None, typer.Option("--stream/--no-stream", help="Text as it comes; default: yes, with --json no.")
]


def start(context: typer.Context, as_json: bool) -> Output:
    """The output of a command whose body begins here.

    Raises:
        InvalidArgument: a number that was given is infinite, or none.
    """
    redirect_prints()
    output: Output = context.obj
    output.as_json = as_json
    for name, value in context.params.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, float) and not math.isfinite(one):
                raise InvalidArgument(f"--{name.replace('_', '-')} must be a number, got {one}")
    return output


def checked_file(file: Path | None) -> Path | None:
    """That will be written to: asked before hours are measured.

    Raises:
        InvalidArgument: it cannot be.
    """
    if file is None:
        return None
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise InvalidArgument(f"cannot write to {shown(str(file))}")
    return file


def checked_worker(worker: str) -> str:
    """Raises:
    InvalidArgument: no worker can have this id.
    """
    if not 1 <= len(worker) <= MAX_ID_CHARS:
        raise InvalidArgument(f"a worker's id has 1 to {MAX_ID_CHARS} characters, got {shown(worker)}")
    return worker


def overrides(**values: Any) -> dict[str, Any]:
    """{"section.key": value} of the flags that were given; `section__key=value` names one."""
    return {name.replace("__", "."): value for name, value in values.items() if value is not None}
