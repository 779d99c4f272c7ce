"""What `pd-relay top` shows: pools, workers and the seven stages now, and how they were at the looks before. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from pd_ops.output import Document
from pd_ops.tables import mib, table

COLUMNS = (
    "worker", "state", "blocks in use", "", "before", "running", "waiting", "in host memory", "leases", "pins",
    "queued tokens", "prefill/s", "between tokens", "fetched/s", "resident",
)
COUNTS = ("num_running", "num_waiting", "num_preempted", "num_leases", "num_pins", "queued_prefill_tokens")
TOTALS = ("num_handoffs_total", "handoff_bytes_total", "num_drafted_total", "num_accepted_total")
BAR_CHARS = 12
NUM_BEFORE = 24  # looks that a history shows
LEVELS = "▁▂▃▄▅▆▇█"

Shares = dict[str, float]


class Screen:
    """One look after the other, of one router."""

    def __init__(self) -> None:
        self._before: Document | None = None
        self._shares: dict[str, Shares] = {}  # the last that there were, by worker, pool or "router"
        self._past: dict[str, deque[float]] = {}

    def text(self, document: Document) -> str:
        """One screen. Rates and stages are those since the look before; of the first look, those of the whole life."""
        before, seconds = self._before, 0.0
        if before is not None:
            seconds = document["uptime_seconds"] - before["uptime_seconds"]
            if seconds <= 0:  # another router
                before, seconds = None, 0.0
        self._before = document
        pools = {role: [one for one in document["workers"] if one["role"] == role] for role in _roles(document)}
        rows = []
        for role, workers in pools.items():
            rows.append(self._pool_row(role, workers))
            rows += [self._worker_row(worker, before, seconds) for worker in workers]
        self._note_stages(document, pools, before, seconds)
        stages = [self._stages_text(who) for who in ("router", *(f"{role} pool" for role in pools),
                                                     *(worker["id"] for worker in document["workers"]))]
        lines = [head_text(document, before, seconds), table(COLUMNS, rows), *filter(None, stages)]
        return "\n".join([*lines, *filter(None, [experts_text(document["expert_max_over_mean"])])])

    def _pool_row(self, role: str, workers: Sequence[Document]) -> list[object]:
        total = sum(one["num_blocks_total"] for one in workers)
        free = sum(one["num_blocks_free"] for one in workers)
        num_ready = sum(one["state"] == "ready" for one in workers)
        return [
            role, f"{num_ready} of {len(workers)} ready", *self._blocks(f"{role} pool", total, free, 0),
            *(sum(one[name] for one in workers) for name in COUNTS), "", "", "",
            mib(sum(one["rss_bytes"] for one in workers)),
        ]

    def _worker_row(self, worker: Document, before: Document | None, seconds: float) -> list[object]:
        speed, itl_ms = worker["prefill_tokens_per_s"], worker["itl_ms"]
        old = _same_life(worker, before)
        fetched = "-" if old is None else megabytes(
            (worker["fetched_bytes_total"] - old["fetched_bytes_total"]) / seconds
        )
        return [
            f"  {worker['id']}", worker["state"],
            *self._blocks(
                worker["id"], worker["num_blocks_total"], worker["num_blocks_free"], worker["num_quarantined_blocks"]
            ),
            *(worker[name] for name in COUNTS), f"{speed:.0f}" if speed else "-", f"{itl_ms:.1f} ms" if itl_ms else "-",
            fetched, mib(worker["rss_bytes"]),
        ]

    def _blocks(self, who: str, total: int, free: int, num_quarantined: int) -> list[str]:
        share = 1 - free / total if total else 0.0
        quarantined = f", {num_quarantined} in quarantine" if num_quarantined else ""
        return [f"{100 * share:.0f} % of {total}{quarantined}", bar(share), self._remember(f"{who} blocks", share)]

    def _note_stages(
        self, document: Document, pools: Mapping[str, Sequence[Document]], before: Document | None, seconds: float
    ) -> None:
        """Of the router, of the time that has gone by; of workers and pools, of the steps that were watched."""
        mine = {} if before is None else before["router_stage_seconds"]
        self._note_shares("router", document["router_stage_seconds"], mine, seconds or document["uptime_seconds"])
        for role, workers in pools.items():
            olds = [_same_life(worker, before) or {"stage_seconds": {}, "watched_seconds": 0.0} for worker in workers]
            for worker, old in zip(workers, olds, strict=True):
                self._note_shares(
                    worker["id"], worker["stage_seconds"], old["stage_seconds"],
                    worker["watched_seconds"] - old["watched_seconds"],
                )
            self._note_shares(
                f"{role} pool", _sum([one["stage_seconds"] for one in workers]),
                _sum([one["stage_seconds"] for one in olds]),
                sum(one["watched_seconds"] for one in workers) - sum(one["watched_seconds"] for one in olds),
            )

    def _note_shares(self, who: str, total: Mapping[str, float], old: Mapping[str, float], whole: float) -> None:
        """Where nothing was watched since, the last shares stay."""
        if whole <= 0:
            return
        shares = {name: max(0.0, seconds - old.get(name, 0.0)) / whole for name, seconds in total.items()}
        shares["else"] = max(0.0, 1 - sum(shares.values()))
        self._shares[who] = shares

    def _stages_text(self, who: str) -> str:
        """Such as "decode-0: experts 41.0 % ▃▄▃, attention 30.0 % ▂▂▃"; empty if nothing is timed there."""
        shares = self._shares.get(who)
        if shares is None:
            return ""
        texts = []
        for name, share in shares.items():
            past = self._remember(f"{who} {name}", share)
            texts.append(f"{name} {100 * share:.1f} %{f' {past}' if past else ''}")
        return f"{who}: {', '.join(texts)}"

    def _remember(self, name: str, share: float) -> str:
        """The history with this value; empty where it is the first one."""
        past = self._past.setdefault(name, deque(maxlen=NUM_BEFORE))
        past.append(share)
        return history(past) if len(past) > 1 else ""


def head_text(document: Document, before: Document | None, seconds: float) -> str:
    text = (
        f"cluster {document['cluster']!r}, up {document['uptime_seconds']:.0f} s: {document['requests_running']} "
        f"requests on workers, {document['requests_waiting']} in line"
    )
    grown = {name: document[name] - (0 if before is None else before[name]) for name in TOTALS}
    if before is None:
        text += f"; {grown['num_handoffs_total']} handoffs, {megabytes(grown['handoff_bytes_total'])}"
    else:
        text += (
            f"; {grown['num_handoffs_total'] / seconds:.1f} handoffs/s, "
            f"{megabytes(grown['handoff_bytes_total'] / seconds)}/s"
        )
    if grown["num_drafted_total"] > 0:
        text += f"; {100 * grown['num_accepted_total'] / grown['num_drafted_total']:.0f} % of drafts accepted"
    return text


def experts_text(skews: Mapping[str, Sequence[float | None]]) -> str:
    """Empty if nobody counts experts' tokens."""
    pools = [
        f"{role} {' '.join('-' if one is None else f'{one:.2f}' for one in rows)}"
        for role, rows in skews.items() if rows
    ]
    return f"busiest expert over the mean, by layer: {'; '.join(pools)}" if pools else ""


def bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR_CHARS)
    return "#" * full + "." * (BAR_CHARS - full)


def history(shares: Sequence[float]) -> str:
    """A character a share of 1, the oldest first."""
    top = len(LEVELS) - 1
    return "".join(LEVELS[round(min(max(share, 0.0), 1.0) * top)] for share in shares)


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _roles(document: Document) -> list[str]:
    return list(dict.fromkeys(worker["role"] for worker in document["workers"]))


def _same_life(worker: Document, before: Document | None) -> Document | None:
    """The same worker in the look before; None if there was none, or another life of it."""
    for old in () if before is None else before["workers"]:
        if (old["id"], old["epoch"]) == (worker["id"], worker["epoch"]):
            found: Document = old
            return found
    return None


def _sum(seconds: Sequence[Mapping[str, float]]) -> Shares:
    total: Shares = {}
    for one in seconds:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total
