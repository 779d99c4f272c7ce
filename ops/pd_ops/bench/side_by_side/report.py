"""All turns of a folder as one table and one plot. Pure but for reading the folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_engine.errors import NotFound
from pd_ops.bench.identity import identity_text
from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.about import text_of, without_path
from pd_ops.bench.serve.plot import GAP, MARGIN, PANEL, WIDTH, Axes
from pd_ops.bench.serve.result import RESULT_FILE, read_result
from pd_ops.bench.side_by_side.systems import System
from pd_ops.bench.side_by_side.turns import FAILED_FILE, PLAN_FILE, STALL_FILE, run_folder, turn_folder

COLORS = {System.PD_RELAY: "#247", System.ONE_POOL: "#2a7", System.VLLM: "#e90"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One system's run at one rate in one round.

    Attributes:
        good_share: of all that were sent.
        goodput_per_s: good requests by the second in which requests came, not by how long the last one took.
    """

    number: int
    system: System
    rate: float
    good_share: float
    goodput_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    interrupted: bool
    identity: Document


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Attributes:
    stalls: by system, what `long_prompt` found in each round.
    failures: sentences.
    """

    plan: Document
    runs: tuple[Run, ...]
    stalls: dict[System, list[Document]]
    failures: tuple[str, ...]


def read_turns(folder: Path) -> Turns:
    """Raises:
    NotFound: nothing has been measured there.
    InvalidArgument: a result is broken.
    """
    file = folder / PLAN_FILE
    if not file.is_file():
        raise NotFound(f"{folder} holds no plan: nothing has been measured there")
    plan = json.loads(file.read_text(encoding="utf-8"))
    runs, failures = [], []
    stalls: dict[System, list[Document]] = {}
    for number in range(1, plan["rounds"] + 1):
        for system in (System(name) for name in plan["systems"]):
            mine = turn_folder(folder, number, system)
            if (mine / FAILED_FILE).is_file():
                why = (mine / FAILED_FILE).read_text(encoding="utf-8").strip().partition(": ")[0]
                failures.append(f"round {number}, {system.value}: {why} (more in {FAILED_FILE} of that turn)")
            if (mine / STALL_FILE).is_file():
                stalls.setdefault(system, []).append(json.loads((mine / STALL_FILE).read_text()))
            runs += [
                _run(number, system, rate, path) for rate in plan["rates"]
                if ((path := run_folder(folder, number, system, rate)) / RESULT_FILE).is_file()
            ]
    if not runs and not stalls:
        raise NotFound(f"{folder} holds no figure yet: {'; '.join(failures) or 'every turn is still to come'}")
    return Turns(plan=plan, runs=tuple(runs), stalls=stalls, failures=tuple(failures))


def _run(number: int, system: System, rate: float, path: Path) -> Run:
    result = read_result(path)
    summary = result.summary
    return Run(
        number=number, system=system, rate=rate, good_share=summary["good_share"],
        goodput_per_s=rate * summary["good_share"], ttft_p50_ms=summary["ttft_ms"]["p50"],
        ttft_p99_ms=summary["ttft_ms"]["p99"], itl_p50_ms=summary["itl_ms"]["p50"], itl_p99_ms=summary["itl_ms"]["p99"],
        interrupted=bool(result.document["interrupted"]), identity=result.identity,
    )


def markdown(turns: Turns, plot_name: str) -> str:
    """The whole page."""
    plan = turns.plan
    lines = [
        "# Side by side", "",
        f"`ops/peers/side_by_side.py`, {plan['rounds']} rounds in which every system has its turn, on cores "
        f"{plan['cores']}: our worker on each; routers, vLLM's servers and the load generator on both. Requests of "
        f"`{' '.join(plan['load'])}` come for {plan['seconds']:g} s, over OpenAI's HTTP API, the same for all; a run "
        f"is ended after {plan['limit_s']:g} s. Good: first token within {plan['ttft_target_ms']:g} ms, at most "
        f"{plan['itl_target_ms']:g} ms a token on average. Goodput counts good requests by the seconds in which "
        "requests came. Medians of the rounds, their least and greatest in brackets.", "",
        "| requests/s | system | good | goodput/s | TTFT p50 | p99, ms | ITL p50 | p99, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rate in plan["rates"]:
        for system in (System(name) for name in plan["systems"]):
            runs = [run for run in turns.runs if run.system is system and run.rate == rate]
            if runs:
                lines.append(_line(rate, system, runs))
    lines += ["", *_ratios(turns), *_stalls(turns)]
    lines += [f"![good share, first tokens and times between tokens]({plot_name})", ""]
    lines += [f"Not measured: {failure}" for failure in turns.failures]
    return "\n".join([*lines, "", "What was measured:", "", *_identities(turns), ""])


def _line(rate: float, system: System, runs: Sequence[Run]) -> str:
    cells = [_spread(runs, lambda run: 100 * run.good_share, " %"), _spread(runs, lambda run: run.goodput_per_s)]
    for first, second in (("ttft_p50_ms", "ttft_p99_ms"), ("itl_p50_ms", "itl_p99_ms")):
        cells += [_spread(runs, lambda run, name=name: getattr(run, name)) for name in (first, second)]  # type: ignore[misc]
    ended = " (ended early)" if any(run.interrupted for run in runs) else ""
    return f"| {rate:g} | {system.value}{ended} | {' | '.join(cells)} |"


def _ratios(turns: Turns) -> list[str]:
    """pd-relay's to vLLM's of the same round: the median."""
    lines = []
    for rate in turns.plan["rates"]:
        pairs = [
            (mine, other) for mine in turns.runs for other in turns.runs
            if mine.system is System.PD_RELAY and other.system is System.VLLM
            and mine.number == other.number and mine.rate == other.rate == rate
        ]
        if not pairs:
            continue
        known = {
            name: [getattr(mine, key) / getattr(other, key) for mine, other in pairs
                   if getattr(mine, key) is not None and getattr(other, key)]
            for name, key in (("goodput", "goodput_per_s"), ("TTFT p50", "ttft_p50_ms"), ("ITL p50", "itl_p50_ms"))
        }
        words = ", ".join(
            f"{name} × {statistics.median(values):.2f}{_of_how_many(len(values), len(pairs))}" if values else
            f"{name}: vLLM has none in any round" for name, values in known.items()
        )
        lines.append(f"At {rate:g} requests a second, pd-relay beside vLLM in the same round (median): {words}.")
    return [*lines, ""] if lines else []


def _of_how_many(count: int, num_rounds: int) -> str:
    """A ratio to nothing is none: it is said how many rounds are in the median."""
    return "" if count == num_rounds else f" (of {count} of {num_rounds} rounds: in the others vLLM has none)"


def _stalls(turns: Turns) -> list[str]:
    if not turns.stalls:
        return []
    lines = [
        "Running answers while a prompt of 2,048 tokens is read, ms between their tokens:", "",
        "| system | quiet p50 | quiet p99 | during p50 | during p99 | p99 during / quiet | the prompt's first token |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = ("quiet_p50_ms", "quiet_p99_ms", "during_p50_ms", "during_p99_ms", "ratio", "first_token_ms")
    for system, found in turns.stalls.items():
        cells = [_number(statistics.median(one[key] for one in found)) for key in keys]
        lines.append(f"| {system.value} | {' | '.join(cells)} |")
    return [*lines, ""]


def _identities(turns: Turns) -> list[str]:
    """Of each system's first run, and of others that are not of the same commit and processor."""
    first: dict[System, Run] = {}
    others: dict[tuple[object, ...], str] = {}
    for run in turns.runs:
        known = first.setdefault(run.system, run)
        if (mine := _made_of(run)) != _made_of(known):
            others.setdefault((run.system, mine), (
                f"{run.system.value} from round {run.number} on: {identity_text(run.identity['host']).splitlines()[0]}"
            ))
    texts = ["; ".join(text_of(without_path(run.identity)).splitlines()) for run in first.values()]
    return [f"> {text}\n" for text in (*texts, *others.values())]


def _made_of(run: Run) -> tuple[object, ...]:
    host = run.identity["host"]
    return host["commit"], host["dirty"], host["cpu_model"], host["cores"], tuple(sorted(host["packages"].items()))


def _spread(runs: Sequence[Run], value: Callable[[Run], float | None], unit: str = "") -> str:
    known = [found for run in runs if (found := value(run)) is not None]
    if not known:
        return "-"
    return f"{_number(statistics.median(known))}{unit} ({_number(min(known))} to {_number(max(known))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot(turns: Turns) -> str:
    """Each run a dot over its rate; the medians of a system joined."""
    panels: list[tuple[str, Callable[[Run], float | None]]] = [
        ("good share of requests, %", lambda run: 100 * run.good_share),
        ("ms to the first token, p50", lambda run: run.ttft_p50_ms),
        ("ms between tokens, p99", lambda run: run.itl_p99_ms),
    ]
    parts = []
    right = 1.1 * max(turns.plan["rates"])
    for number, (title, value) in enumerate(panels):
        top = max((found for run in turns.runs if (found := value(run)) is not None), default=1.0) or 1.0
        axes = Axes(y=60 + number * (PANEL + GAP), right=right, top=top)
        parts.append(axes.frame(title, "requests/s"))
        for system, color in COLORS.items():
            runs = [run for run in turns.runs if run.system is system and value(run) is not None]
            parts += [axes.dot(run.rate, value(run) or 0.0, color) for run in runs]
            medians = [
                (rate, statistics.median(value(run) or 0.0 for run in runs if run.rate == rate))
                for rate in sorted({run.rate for run in runs})
            ]
            parts.append(axes.line(medians, color) if medians else "")
    legend = "".join(
        f'<text x="{MARGIN + 200 * number}" y="36" fill="{color}">{system.value}</text>'
        for number, (system, color) in enumerate(COLORS.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{60 + len(panels) * (PANEL + GAP)}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{MARGIN}" y="18" font-size="13">the same requests, the same cores</text>{legend}'
        f'{"".join(parts)}</svg>\n'
    )
