"""`pd-relay scale`: other sizes for the pools of a running cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_engine.errors import InvalidArgument, shown
from pd_ops.cluster.control_messages import MAX_WORKERS, ScaleRequest
from pd_ops.cluster.plan import WORKER_ROLES
from pd_ops.commands import controlled, options


def command(
    context: typer.Context,
    pools: Annotated[list[str], typer.Argument(help="Such as prefill=3 decode=2; a pool that is not named stays.")],
    timeout: controlled.DrainTimeout = controlled.DEFAULT_DRAIN_S,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """Give the pools of a running cluster other sizes. Requests go on meanwhile; workers that leave drain first."""
    output = options.start(context, as_json)
    sizes = parse_sizes(pools)
    request = ScaleRequest(prefill=sizes.get("prefill"), decode=sizes.get("decode"), drain_s=timeout)
    result = controlled.change(cluster, request, output)
    output.document(result)
    for worker, is_drained in result["removed"].items():
        output.note(f"{worker}: {controlled.drained_text(is_drained)}")
    output.text(f"scaled: {controlled.pools_text(result['pools'])}")


def parse_sizes(words: list[str]) -> dict[str, int]:
    """Raises:
    InvalidArgument: a word is no POOL=NUMBER, or a pool is named twice.
    """
    sizes: dict[str, int] = {}
    for word in words:
        pool, _, number = word.partition("=")
        if pool not in {role.value for role in WORKER_ROLES}:
            raise InvalidArgument(f"a pool's size is prefill=NUMBER or decode=NUMBER, got {shown(word)}")
        if not (number.isascii() and number.isdigit() and len(number) <= 4 and 1 <= int(number) <= MAX_WORKERS):
            raise InvalidArgument(f"a pool has 1 to {MAX_WORKERS} workers, got {shown(word)}")
        if pool in sizes:
            raise InvalidArgument(f"{pool} is given twice")
        sizes[pool] = int(number)
    return sizes
