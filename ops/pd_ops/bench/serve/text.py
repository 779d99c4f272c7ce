"""A result as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from pd_ops.bench.serve.about import text_of
from pd_ops.output import Document
from pd_ops.tables import table

RANKS = ("p50", "p90", "p95", "p99", "most")
COLUMNS = ("ms", "samples", *RANKS)
BUCKET_COLUMNS = (
    "tokens", "requests", "good", "refused", "TTFT p50", "p99", "ITL p50", "p99", "queue p50", "p99",
    "KiB moved p50", "p99", "handoff ms p50", "p99",
)


def result_text(document: Document) -> str:
    summary = document["summary"]
    lines = [
        text_of(document["identity"]), _load(document["load"]), "", *_goodput(summary, document["targets"]), "",
        _latencies(summary), *_more(summary),
    ]
    for name, key in (("prompt", "by_prompt_tokens"), ("answer", "by_completion_tokens"),
                      ("context", "by_context_tokens")):
        lines += ["", f"by {name}", _buckets(summary[key])]
    if document["interrupted"]:
        lines += ["", f"interrupted: {summary['unfinished']} requests were still running, and count as not good"]
    return "\n".join(lines)


def _load(load: Document) -> str:
    what = load["trace"] or ", ".join(load["kinds"])
    how = (
        f"closed loop of {load['concurrency']}: latencies do not include waiting for a turn" if load["loop"] == "closed"
        else f"open loop, {load['arrivals']}, " + (
            "all at one moment" if load["rate_per_s"] is None else f"{load['rate_per_s']:.3g} requests/s"
        )
    )
    clipped = f", {load['num_clipped']} clipped to the context" if load["num_clipped"] else ""
    return (
        f"{what}: {load['requests']} requests, {load['prompt_tokens']:,} + {load['output_tokens']:,} tokens, lengths x "
        f"{load['length_scale']:.3g}{clipped}, {load['shared_block_share']:.0%} of prompt blocks shared; {how}; seed "
        f"{load['seed']}"
    )


def _goodput(summary: Document, targets: Document) -> list[str]:
    ttft, itl = (_number(targets[name]) for name in ("ttft_ms", "itl_ms"))
    return [
        f"goodput {summary['goodput_per_s']:.3f} requests/s: {summary['good']} of {summary['requests']} "
        f"({summary['good_share']:.1%}) had TTFT <= {ttft} ms and {targets['itl_of']} ITL <= {itl} ms",
        f"{summary['finished']} finished, {summary['refused']} refused, {summary['failed']} failed, "
        f"{summary['unfinished']} unfinished, in {summary['span_s']:.1f} s: "
        f"{summary['requests_per_s']:.3f} requests/s, "
        f"{summary['prompt_tokens_per_s']:.1f} + {summary['completion_tokens_per_s']:.1f} tokens/s",
    ]


def _latencies(summary: Document) -> str:
    names = (("to the first token", "ttft_ms"), ("between tokens", "itl_ms"), ("whole request", "request_ms"),
             ("queue, as the router expected", "queue_ms"), ("sent late by the generator", "lag_ms"))
    return table(COLUMNS, [
        (name, summary[key]["count"], *(_number(summary[key][rank]) for rank in RANKS)) for name, key in names
    ])


def _more(summary: Document) -> list[str]:
    lines = []
    if summary["finished"] < summary["requests"]:
        lines.append("times are of requests that finished; the others are in none of them, and not good")
        lines += [f"{one['count']} x {one['error'][:200]}" for one in summary["errors"]]
    if summary["short"]:
        lines.append(f"{summary['short']} answers were shorter than asked for: less work than this load is elsewhere")
    if summary["drafted_tokens"]:
        share = summary["accepted_tokens"] / summary["drafted_tokens"]
        lines.append(f"drafts: {summary['accepted_tokens']:,} of {summary['drafted_tokens']:,} accepted ({share:.1%})")
    if summary["cached_tokens"] is not None and summary["prompt_tokens"]:
        share = summary["cached_tokens"] / summary["prompt_tokens"]
        lines.append(f"cache: {summary['cached_tokens']:,} of {summary['prompt_tokens']:,} prompt tokens ({share:.1%})")
    handoff = summary["handoff"]
    if handoff["count"]:
        lines.append(f"handoffs: {handoff['count']}, p50 {_number(handoff['bytes']['p50'])} bytes, of them "
                     f"{_number(handoff['exposed_bytes']['p50'])} after the prompt had been computed; second tokens "
                     f"waited {_number(handoff['wait_ms']['p50'])} ms for them (p99 "
                     f"{_number(handoff['wait_ms']['p99'])})")
    return lines


def _buckets(rows: Sequence[Document]) -> str:
    return table(BUCKET_COLUMNS, [
        (f"{row['above'] + 1} to {row['up_to']}" if row["up_to"] else f"{row['above'] + 1} and more", row["requests"],
         row["good"], row["refused"],
         *(_number(row[key][rank]) for key in ("ttft_ms", "itl_ms", "queue_ms") for rank in ("p50", "p99")),
         *(_kib(row["handoff"]["bytes"][rank]) for rank in ("p50", "p99")),
         *(_number(row["handoff"]["wait_ms"][rank]) for rank in ("p50", "p99")))
        for row in rows
    ])


def _kib(num_bytes: float | None) -> str:
    return _number(None if num_bytes is None else num_bytes / 1024)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
