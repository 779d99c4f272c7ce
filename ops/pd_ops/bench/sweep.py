"""The same load on clusters that differ in one setting at a time; what a folder already has is not measured again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pd_engine.errors import InvalidArgument, PdRelayError
from pd_engine.settings import Settings, load_settings
from pd_ops.bench.energy import EnergyMeter
from pd_ops.bench.harness import Seat, running
from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.about import text_of, without_path
from pd_ops.bench.serve.result import RESULT_FILE, read_result
from pd_ops.bench.serve_turn import WARM_UP, serve_turn
from pd_ops.sizing.study import front
from pd_ops.tables import table

PLAN_FILE, FAILED_FILE, ENERGY_FILE = "plan.json", "failed.txt", "energy.json"
BASE = "base"
SALT = "sweep"  # the same prompts for all: each cluster is a new one, so no cache knows them
MAX_VARIANTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One setting that is other than in the base; `key` empty: the base itself."""

    key: str = ""
    value: Any = None

    @property
    def name(self) -> str:
        return f"{self.key}={self.value}" if self.key else BASE

    @property
    def overrides(self) -> dict[str, Any]:
        return {self.key: self.value} if self.key else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """Attributes:
    load: flags of `bench serve`, targets included.
    config: settings file of the base.
    overrides: settings over it, of every variant.
    limit_s: after which a run is ended.
    """

    load: tuple[str, ...]
    config: Path | None
    overrides: dict[str, Any]
    variants: tuple[Variant, ...]
    limit_s: float

    def to_json(self) -> Document:
        document = {**asdict(self), "config": None if self.config is None else str(self.config)}
        plain: Document = json.loads(json.dumps(document))
        return plain


def parse_vary(texts: Sequence[str]) -> tuple[Variant, ...]:
    """The base, and a variant for each value of each SECTION.KEY=V1,V2.

    Raises:
        InvalidArgument: one is of another form, or there are too many.
    """
    variants = [Variant()]
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise InvalidArgument(f"--vary must be SECTION.KEY=V1,V2, such as decode.workers=1,2, got {text[:60]!r}")
        variants += [Variant(key=key, value=_plain(key, value)) for value in values.split(",")]
    if len(variants) > MAX_VARIANTS:
        raise InvalidArgument(f"{len(variants)} variants; at most {MAX_VARIANTS} are measured at once")
    return tuple(dict.fromkeys(variants))


def _plain(key: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = []
    if isinstance(value, list | dict | set):
        raise InvalidArgument(f"--vary {key} must be plain values between commas, got {text[:60]!r}")
    return value


def settings_of(plan: SweepPlan, variant: Variant) -> Settings:
    """Raises:
    InvalidArgument: there is no such setting, or it cannot have this value.
    """
    return load_settings(plan.config, {
        **plan.overrides, **variant.overrides, "router.grpc_port": 0, "router.http_port": 0,
    })


def keep_plan(folder: Path, plan: SweepPlan) -> None:
    """Raises:
    InvalidArgument: the folder holds figures of another plan, or a variant is not possible.
    """
    for variant in plan.variants:
        settings_of(plan, variant)
    file, document = folder / PLAN_FILE, plan.to_json()
    try:
        if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != document:
            raise InvalidArgument(f"{file} is of another plan: name another folder, or give the same flags to go on")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{folder} cannot be used for results: {error}") from None


async def sweep(folder: Path, plan: SweepPlan, note: Callable[[str], None]) -> None:
    """One cluster after the other, each anew. One that fails is noted in its folder, and the others go on."""
    for number, variant in enumerate(plan.variants):
        mine = folder / f"{number}"
        if (mine / RESULT_FILE).exists():
            continue
        mine.mkdir(parents=True, exist_ok=True)
        (mine / FAILED_FILE).unlink(missing_ok=True)
        note(f"{number + 1} of {len(plan.variants)}: {variant.name}")
        settings = settings_of(plan, variant)
        seats = [Seat(role="prefill")] * settings.prefill.workers + [Seat(role="decode")] * settings.decode.workers
        try:
            async with running(settings, mine, seats) as doors:
                where = ("--address", doors["grpc"])
                await serve_turn((*where, *WARM_UP), mine / "warm-up.log", plan.limit_s)
                meter = EnergyMeter()
                flags = (*where, "--prompt-salt", SALT, *plan.load, "--out", str(mine))
                await serve_turn(flags, mine / "serve.log", plan.limit_s)
                (mine / ENERGY_FILE).write_text(json.dumps({"joules": meter.joules()}) + "\n", encoding="utf-8")
        except PdRelayError as error:
            (mine / FAILED_FILE).write_text(error.message + "\n", encoding="utf-8")
            note(f"{variant.name} failed: {error.message}")


def read_rows(folder: Path, plan: SweepPlan) -> list[Document]:
    """Of the variants that were measured, the documented keys."""
    rows: list[Document] = []
    for number, variant in enumerate(plan.variants):
        mine = folder / f"{number}"
        if not (mine / RESULT_FILE).is_file():
            continue
        result, settings = read_result(mine), settings_of(plan, variant)
        summary = result.summary
        energy = json.loads((mine / ENERGY_FILE).read_text()) if (mine / ENERGY_FILE).is_file() else {"joules": None}
        workers, finished = settings.prefill.workers + settings.decode.workers, summary["finished"]
        rows.append({
            "variant": variant.name, "prefill": settings.prefill.workers, "decode": settings.decode.workers,
            "goodput_per_s": summary["goodput_per_s"], "good_share": summary["good_share"],
            "ttft_ms": {rank: summary["ttft_ms"][rank] for rank in ("p50", "p99")},
            "itl_ms": {rank: summary["itl_ms"][rank] for rank in ("p50", "p99")},
            "worker_s_per_request": workers * summary["span_s"] / finished if finished else None,
            "joules_per_request": energy["joules"] / finished if energy["joules"] and finished else None,
            "ended_early": bool(result.document["interrupted"]),
        })
    return [{**row, "front": mark} for row, mark in zip(rows, front(rows), strict=True)]


def first_identity(folder: Path, plan: SweepPlan) -> Document | None:
    """Of the first variant that was measured, mostly the base; None: none was."""
    folders = (folder / f"{number}" for number in range(len(plan.variants)))
    first = next((mine for mine in folders if (mine / RESULT_FILE).is_file()), None)
    return None if first is None else read_result(first).identity


def text(folder: Path, plan: SweepPlan, rows: Sequence[Document]) -> str:
    columns = ("variant", "workers", "goodput/s", "good", "TTFT p50", "p99 ms", "ITL p50", "p99 ms",
               "worker s/request", "joules/request", "front")
    lines = [
        (row["variant"] + (" (ended early)" if row["ended_early"] else ""),
         f"{row['prefill']}:{row['decode']}", _number(row["goodput_per_s"]), f"{row['good_share']:.0%}",
         *(_number(row[name][rank]) for name in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")),
         _number(row["worker_s_per_request"]), _number(row["joules_per_request"]), "yes" if row["front"] else "")
        for row in rows
    ]
    known = first_identity(folder, plan)
    about = [] if known is None else [text_of(without_path(known))]
    failed = [
        f"not measured: {variant.name}: {(folder / str(number) / FAILED_FILE).read_text(encoding='utf-8').strip()}"
        for number, variant in enumerate(plan.variants) if (folder / str(number) / FAILED_FILE).is_file()
    ]
    return "\n".join([
        *about, f"load: {' '.join(plan.load)}", "one run of each, so small differences may be chance", "",
        table(columns, lines), *failed,
    ])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
