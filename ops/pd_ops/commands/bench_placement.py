"""`pd-relay bench placement`: placements a second on one core, and what the choice is worth on a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.placement_replay import Policy, ReplayRow, replay
from pd_ops.bench.placement_trace import read_trace
from pd_ops.bench.placements import PlacementSpeed, measure_placements
from pd_ops.commands import options
from pd_ops.tables import mib, table

SPEED_COLUMNS = (
    "workers", "blocks", "entries", "index", "prompt blocks", "placements/s", "look-up", "choose", "hash the prompt"
)
REPLAY_COLUMNS = ("prefill workers chosen by", "requests", "cached", "mean TTFT", "p50", "p99")


def command(
    context: typer.Context,
    workers: Annotated[int, typer.Option(help="Of both pools together.")] = 100,
    blocks: Annotated[int, typer.Option(min=1, help="Different cached blocks in the index.")] = 1_000_000,
    prompt_blocks: Annotated[
        list[int] | None, typer.Option(min=2, help="Full blocks of a prompt, half of them cached; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of 500 placements each; the median counts.")] = 9,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (Mooncake's format, .gz or not) in place of the speed.")
    ] = None,
    trace_requests: Annotated[int | None, typer.Option(min=1, help="Of the trace; default: all.")] = None,
    trace_workers: Annotated[int, typer.Option(min=1, help="Simulated prefill workers.")] = 8,
    tokens_per_s: Annotated[float, typer.Option(min=1, help="That each of them computes.")] = 6_000,
    cache_blocks: Annotated[int, typer.Option(min=1, help="Of 512 tokens, that each of them caches.")] = 2_000,
    as_json: options.Json = False,
) -> None:
    """Measure the router's choice of workers, without a cluster: its speed by CPU time of one core, or with --trace the
    times to the first token at simulated prefill workers, beside simpler ways to choose."""
    output = options.start(context, as_json)
    about = identity()
    speeds: list[PlacementSpeed] = []
    replays: list[ReplayRow] = []
    if trace is not None:
        requests = read_trace(trace, trace_requests)
        replays = [
            replay(
                requests, policy, num_workers=trace_workers, tokens_per_s=tokens_per_s, cache_blocks=cache_blocks
            )
            for policy in Policy
        ]
    else:
        speeds = [
            measure_placements(num_workers=workers, num_blocks=blocks, num_prompt_blocks=count, rounds=rounds)
            for count in prompt_blocks or [128]
        ]
    output.document({
        **about, "rounds": rounds, "rows": [row.to_json() for row in speeds],
        "replays": [row.to_json() for row in replays],
    })
    output.text("\n".join([identity_text(about), _replay_table(replays) if replays else _speed_table(speeds)]))


def _speed_table(rows: list[PlacementSpeed]) -> str:
    return table(SPEED_COLUMNS, [
        (row.num_workers, row.num_blocks, row.num_entries, mib(row.index_bytes), row.num_prompt_blocks,
         f"{row.placements_per_s:,.0f}", f"{row.look_up_us:.1f} us", f"{row.choose_us:.1f} us",
         f"{row.hash_us:.0f} us")
        for row in rows
    ])


def _replay_table(rows: list[ReplayRow]) -> str:
    return table(REPLAY_COLUMNS, [
        (row.policy, row.num_requests, f"{row.cached_share:.0%}", f"{row.ttft_mean_s:.2f} s",
         f"{row.ttft_p50_s:.2f} s", f"{row.ttft_p99_s:.2f} s")
        for row in rows
    ])
