"""Rounds in which every system has its turn; what a folder already has is not measured again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pd_engine.errors import InvalidArgument, PdRelayError
from pd_engine.model.config import ModelConfig
from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.result import RESULT_FILE
from pd_ops.bench.serve_turn import WARM_UP, serve_turn
from pd_ops.bench.side_by_side.long_prompt import LONG_PROMPT, disturb
from pd_ops.bench.side_by_side.systems import Serving, Stage, System, serving

PLAN_FILE, STALL_FILE, FAILED_FILE = "plan.json", "long_prompts.json", "failed.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What every system gets in every round.

    Attributes:
        load: flags of `bench serve` that say what is sent, but for how much and how fast.
        rates: requests a second, one run each. seconds: that requests come for.
        limit_s: after which a run is ended; what has not finished then is not good.
        long_prompts: of the last part of a turn; 0: it is left out. stream_tokens: of the answers beside them.
    """

    load: tuple[str, ...]
    rates: tuple[float, ...]
    seconds: float
    limit_s: float
    ttft_target_ms: float
    itl_target_ms: float
    rounds: int
    systems: tuple[str, ...]
    long_prompts: int
    stream_tokens: int

    def to_json(self) -> Document:
        return asdict(self)


def run_folder(folder: Path, number: int, system: System, rate: float) -> Path:
    return turn_folder(folder, number, system) / f"rate-{rate:g}"


def turn_folder(folder: Path, number: int, system: System) -> Path:
    return folder / f"round-{number}" / system.value


def keep_plan(folder: Path, plan: Plan, stage: Stage) -> None:
    """Raises:
    InvalidArgument: the folder holds figures of another plan.
    """
    document = json.loads(json.dumps({**plan.to_json(), **{name: str(value) for name, value in asdict(stage).items()}}))
    file = folder / PLAN_FILE
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != document:
        raise InvalidArgument(f"{file} is of another plan: name another folder, or give the same flags to go on")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


async def take_turns(folder: Path, plan: Plan, stage: Stage, note: Callable[[str], None]) -> None:
    """All that is not there yet. A system that fails is noted in its folder, and the others go on."""
    systems = [System(name) for name in plan.systems]
    for number in range(1, plan.rounds + 1):
        shift = (number - 1) % len(systems)
        for system in systems[shift:] + systems[:shift]:
            mine = turn_folder(folder, number, system)
            runs = [
                rate for rate in plan.rates if not (run_folder(folder, number, system, rate) / RESULT_FILE).exists()
            ]
            wants_long = plan.long_prompts > 0 and not (mine / STALL_FILE).exists()
            if not runs and not wants_long:
                continue
            mine.mkdir(parents=True, exist_ok=True)
            (mine / FAILED_FILE).unlink(missing_ok=True)
            note(f"round {number} of {plan.rounds}: starting {system.value}")
            try:
                async with serving(system, stage, mine) as ready:
                    await _turn(folder, number, system, plan, stage, ready, runs, wants_long=wants_long, note=note)
            except PdRelayError as error:
                (mine / FAILED_FILE).write_text(error.message + "\n", encoding="utf-8")
                note(f"round {number}: {system.value} failed: {error.message}")


async def _turn(
    folder: Path, number: int, system: System, plan: Plan, stage: Stage, ready: Serving, rates: Sequence[float], *,
    wants_long: bool, note: Callable[[str], None],
) -> None:
    mine = turn_folder(folder, number, system)
    await serve_turn((*ready.flags, *WARM_UP), mine / "warm-up.log", plan.limit_s)
    for rate in rates:
        note(f"round {number}: {system.value}, {rate:g} requests a second")
        flags = (
            *plan.load, "--rate", str(rate), "--requests", str(max(1, round(rate * plan.seconds))), "--seed",
            str(number), "--prompt-salt", f"round {number}, rate {rate:g}", "--ttft-target-ms",
            str(plan.ttft_target_ms), "--itl-target-ms", str(plan.itl_target_ms), "--out",
            str(run_folder(folder, number, system, rate)),
        )
        await serve_turn((*ready.flags, *flags), mine / f"rate-{rate:g}.log", plan.limit_s)
    if wants_long:
        note(f"round {number}: {system.value}, prompts of {LONG_PROMPT} tokens beside running answers")
        found = await disturb(
            ready.url, num_prompts=plan.long_prompts, stream_tokens=plan.stream_tokens,
            vocab_size=ModelConfig.load(stage.model).vocab_size, salt=f"round {number}",
        )
        (mine / STALL_FILE).write_text(json.dumps(found.to_json()) + "\n", encoding="utf-8")
