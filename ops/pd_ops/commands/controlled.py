"""What the commands share that change a running cluster through its controller."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from pd_ops.cluster.control_client import ask_controller
from pd_ops.cluster.control_messages import MAX_DRAIN_S, Request
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.output import Document, Interrupted, Output

DEFAULT_DRAIN_S = 60.0

DrainTimeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=0, max=MAX_DRAIN_S,
        help="Seconds in which requests of a worker that leaves may finish there; what is left goes on elsewhere.",
    ),
]


def change(cluster: str, request: Request, output: Output) -> Document:
    """The result of a request, its progress noted.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came first.
        PdRelayError: it could not be done.
    """
    return asyncio.run(_change(cluster, request, output))


async def _change(cluster: str, request: Request, output: Output) -> dict[str, Any]:
    result = await unless(Interrupts().first, ask_controller(cluster, request, output.note))
    if result is None:
        output.document({"interrupted": True})
        output.note("interrupted: the step that is under way is finished, no other is begun; pd-relay status shows it")
        raise Interrupted
    return result


def pools_text(pools: dict[str, int]) -> str:
    """Such as "prefill=1 decode=2"."""
    return " ".join(f"{role}={size}" for role, size in pools.items())


def drained_text(drained: bool) -> str:
    return "all its requests had ended" if drained else "what was left there goes on elsewhere"
