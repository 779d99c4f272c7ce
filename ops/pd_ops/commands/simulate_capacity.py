"""`pd-relay simulate capacity`: pools of several sizes under one load, in simulated time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pd_engine.errors import InvalidArgument
from pd_ops.bench.identity import identity, identity_text
from pd_ops.commands import options
from pd_ops.output import Document
from pd_ops.tables import table

if TYPE_CHECKING:
    from pd_ops.bench.serve.result import Result
    from pd_ops.sizing.cost_model import CostModel
    from pd_ops.sizing.study import Study

TTFT_MS, ITL_MS = 2000.0, 100.0
MAX_CONTEXT, CACHE_TOKENS = 131_072, 100_000
HARDWARE_NAMES = ("h100", "h800", "h200", "b200")
COLUMNS = ("pools", "good", "goodput/s", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "cached", "prefill busy",
           "decode busy", "batch", "worker s/request", "front")
COST_COLUMNS = ("cost", "device hours", "a million input", "a million output", "a thousand good requests")


def command(
    context: typer.Context,
    fit: Annotated[Path | None, typer.Option(help="Result of bench serve, from which costs are fitted.")] = None,
    cost: Annotated[Path | None, typer.Option(help="Cost model, as --write-cost writes it.")] = None,
    hardware: Annotated[str | None, typer.Option(help=f"Costs by data sheet: {', '.join(HARDWARE_NAMES)}.")] = None,
    model: Annotated[str, typer.Option(help="Of --hardware: as of pd-relay capacity.")] = "deepseek-v3",
    prefill_devices: Annotated[int, typer.Option(min=1, help="Of --hardware: devices of a prefill worker.")] = 32,
    decode_devices: Annotated[int, typer.Option(min=1, help="Of --hardware: devices of a decode worker.")] = 144,
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1, help="Of --hardware: share of the data sheet's rates.")
    ] = 1.0,
    tokens_per_step: Annotated[float, typer.Option(min=1, max=16, help="Of --hardware: with accepted drafts.")] = 1.0,
    write_cost: Annotated[Path | None, typer.Option(help="File to write the cost model to.")] = None,
    pools: Annotated[list[str] | None, typer.Option(help="P:D, prefill and decode workers; repeatable.")] = None,
    workers: Annotated[int | None, typer.Option(min=2, max=64, help="All ratios of so many workers.")] = None,
    cell_workers: Annotated[
        int | None, typer.Option(min=2, help="Of more workers, so many play together; for thousands.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Load: the requests of this bench serve result, beside what it measured.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Load: Mooncake, Azure or ServeGen.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Load: built-in kinds, as bench serve has them.")] = None,
    requests: Annotated[int, typer.Option(min=2, max=10_000_000, help="Of a trace or kinds.")] = 1000,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Requests a second; default: the trace's, or 1.")
    ] = None,
    burstiness: Annotated[float | None, typer.Option(min=0, max=100, help="Variation of the gaps.")] = None,
    length_scale: Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="Lengths times this.")] = None,
    max_context: Annotated[int, typer.Option(min=2, help="Longer requests are clipped.")] = MAX_CONTEXT,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="That a worker's cache holds; default: by --hardware's memory, or 100000.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help="engine.chunk_tokens; default: the replayed result's, --hardware's, 256.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="decode.max_batch; default: the replayed result's, --hardware's, 64.")
    ] = None,
    local_tokens: Annotated[
        int | None, typer.Option(min=0, help="router.local_prefill_tokens; default: the replayed result's, or 64.")
    ] = None,
    max_queued_ms: Annotated[
        float | None, typer.Option(min=0, help="router.max_prefill_queue_ms; default: the replayed result's, or 2000.")
    ] = None,
    ttft_target_ms: Annotated[float, typer.Option(min=0, help="A good request has its first token by then.")] = TTFT_MS,
    itl_target_ms: Annotated[float, typer.Option(min=0, help="And no more than this between tokens.")] = ITL_MS,
    refuse: Annotated[bool, typer.Option("--refuse", help="The router refuses by the targets.")] = False,
    fail: Annotated[
        list[str] | None, typer.Option(help="WORKER@SECONDS: it dies then; each pool is played with and without.")
    ] = None,
    back_after: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds until a dead worker serves again.")
    ] = 30.0,
    device_hour: Annotated[float | None, typer.Option(min=0, help="Price of a device for an hour.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the load and of what varies.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Play a load on pools of several sizes with the router's own classes, in simulated time: which ratio of prefill to
    decode workers it needs, what a dead worker costs, when local prefill is worth it. What work takes comes from a
    measurement."""
    output = options.start(context, as_json)
    from pd_ops.bench.serve.result import read_result
    from pd_ops.sizing.limits import limits
    from pd_ops.sizing.study import Prices, best_ratios, compared, front, parse_failure

    about = identity()
    options.checked_file(write_cost)
    costs, sizes = _costs(fit, cost, hardware, {
        "model": model, "prefill_devices": prefill_devices, "decode_devices": decode_devices, "efficiency": efficiency,
        "tokens_per_step": tokens_per_step,
    }, has_cache_size=cache_tokens is not None)
    if write_cost is not None:
        write_cost.write_text(json.dumps(costs.to_json(), indent=1) + "\n", encoding="utf-8")
    measured = read_result(replay) if replay is not None else None
    plan: Document = {
        "trace": trace, "kinds": tuple(kind or ()), "num_requests": requests, "rate_per_s": rate,
        "variation": burstiness, "length_scale": length_scale, "seed": seed,
    }
    study, load = _study(
        costs, measured, plan, max_context=max_context, sizes=sizes, seed=seed, cell_workers=cell_workers,
        failures=tuple(parse_failure(text, back_after_s=back_after) for text in fail or ()),
        chosen={"cache_tokens": cache_tokens, "chunk_tokens": chunk_tokens, "max_batch": max_batch,
                "local_tokens": local_tokens, "max_queued_ms": max_queued_ms, "refuses": refuse,
                "ttft_target_ms": ttft_target_ms, "itl_target_ms": itl_target_ms},
    )
    rows: list[Document] = []
    chosen = _chosen(pools, workers, measured)
    for failure in study.failures:
        if not any(failure in study.failures_of(*one) for one in chosen):
            raise InvalidArgument(f"--fail {failure.worker_id}: none of these pools has such a worker")
    for prefill, decode in chosen:
        for with_failures in (False, True) if study.failures_of(prefill, decode) else (False,):
            output.note(f"{prefill} prefill, {decode} decode" + (", with failures" if with_failures else ""))
            rows.append(study.row(prefill, decode, with_failures=with_failures))
            if with_failures and not rows[-1]["died"]:
                del rows[-1]
                output.note("  all requests had ended before a worker was to die")
    if device_hour is not None:
        devices = (prefill_devices, decode_devices) if hardware is not None else (1, 1)
        prices = Prices(device_hour=device_hour, prefill_devices=devices[0], decode_devices=devices[1])
        rows = [{**row, "cost": prices.of(row)} for row in rows]
    marks = front(rows)
    document = {
        **about, "cost": costs.to_json(), "worker": _worker(study), "load": load, "seed": seed,
        "ttft_target_ms": ttft_target_ms, "itl_target_ms": itl_target_ms,
        "rows": [{**row, "front": mark} for row, mark in zip(rows, marks, strict=True)],
        "best": best_ratios(rows), "compared": compared(rows, measured, study.pools) if measured is not None else None,
        "limits": limits(costs, rows, most_prompt_tokens=max(one.num_prompt for one in study.travellers())),
    }
    output.document(document)
    output.text(_text(document))


def _costs(fit: Path | None, cost: Path | None, hardware: str | None, deployment: Document, *, has_cache_size: bool
           ) -> tuple[CostModel, Document]:
    """And the sizes that workers have, as far as the hardware tells them. `has_cache_size`: that of caches is given."""
    from pd_ops.bench.serve.result import read_result
    from pd_ops.capacity.named import architecture
    from pd_ops.sizing.cost_model import read_cost
    from pd_ops.sizing.fitting import fit as fitted
    from pd_ops.sizing.roofline import HARDWARE, ROOM_SHARE, Deployment, roofline
    from pd_ops.sizing.roofline import sizes as sizes_of

    if sum(one is not None for one in (fit, cost, hardware)) != 1:
        raise InvalidArgument("give one of --fit RESULT, --cost FILE and --hardware: what work takes has to be known")
    if fit is not None:
        return fitted(read_result(fit)), {}
    if cost is not None:
        return read_cost(cost), {}
    if hardware not in HARDWARE_NAMES:
        raise InvalidArgument(f"--hardware must be {', '.join(HARDWARE_NAMES)}, got {str(hardware)[:40]!r}")
    model = architecture(deployment.pop("model"))
    deployed = Deployment(hardware=HARDWARE[hardware], **deployment)
    costs = roofline(model, deployed, room_share=1.0 if has_cache_size else ROOM_SHARE)
    return costs, sizes_of(model, deployed)


def _study(
    costs: CostModel, measured: Result | None, plan: Document, *, max_context: int, sizes: Document, seed: int,
    cell_workers: int | None, failures: tuple[object, ...], chosen: Document,
) -> tuple[Study, Document]:
    """And what the load is, in the words of bench serve. A replay has the settings of what was measured, but for those
    that were chosen."""
    from pd_ops.bench.serve.load import LoadPlan, build_load
    from pd_ops.sizing.measured import measured_settings
    from pd_ops.sizing.outcome import replayed, travellers_of
    from pd_ops.sizing.pools import Pools
    from pd_ops.sizing.study import Study

    if measured is not None:
        if plan["trace"] is not None or plan["kinds"]:
            raise InvalidArgument("give --replay, or --trace or --kind, not both")
        if not measured.records:
            raise InvalidArgument(f"{measured.path} has no records.jsonl beside it: there is nothing to replay")
        block_size, load = 16, measured.document["load"]
        records = measured.records
        make = lambda: replayed(records)  # noqa: E731
    else:
        built = build_load(LoadPlan(**plan), max_context)
        block_size, load = built.requests[0].block_tokens, built.description
        if any(one.block_tokens != block_size for one in built.requests):
            raise InvalidArgument("the requests of the load have blocks of different sizes")
        make = lambda: travellers_of(built.requests)  # noqa: E731
    settings = sizes | (measured_settings(measured) if measured is not None else {})
    settings |= {name: value for name, value in chosen.items() if value is not None}
    cache_tokens = settings.pop("cache_tokens", CACHE_TOKENS)
    prefill_tokens = settings.pop("prefill_cache_tokens", cache_tokens)
    if chosen["cache_tokens"] is not None:
        prefill_tokens = cache_tokens
    pools = Pools(
        prefill=1, decode=1, num_blocks=max(1, cache_tokens // block_size), block_size=block_size,
        num_prefill_blocks=max(1, prefill_tokens // block_size), **settings,
    )
    study = Study(
        cost=costs, travellers=make, pools=pools, failures=failures, seed=seed, cell_workers=cell_workers,  # type: ignore[arg-type]
    )
    return study, load


def _worker(study: Study) -> Document:
    """Sizes that the result hangs on."""
    pools = study.pools
    in_prefill = pools.num_blocks if pools.num_prefill_blocks is None else pools.num_prefill_blocks
    return {
        "cache_tokens": pools.num_blocks * pools.block_size, "prefill_cache_tokens": in_prefill * pools.block_size,
        "chunk_tokens": pools.chunk_tokens, "max_batch": pools.max_batch, "local_tokens": pools.local_tokens,
    }


def _chosen(pools: list[str] | None, workers: int | None, measured: Result | None) -> list[tuple[int, int]]:
    from pd_ops.sizing.study import parse_pools

    chosen = [parse_pools(text) for text in pools or ()]
    if workers is not None:
        chosen += [(prefill, workers - prefill) for prefill in range(1, workers)]
    if not chosen and measured is not None:
        topology = measured.identity.get("topology") or {}
        chosen = [parse_pools(f"{topology.get('prefill', 0)}:{topology.get('decode', 0)}")]
    if not chosen:
        raise InvalidArgument("give --pools P:D, or --workers N for all ratios of so many")
    return list(dict.fromkeys(chosen))


def _text(document: Document) -> str:
    cost = document["cost"]
    lines = [
        identity_text(document),
        f"costs {cost['source']}: {cost['prefill_ms_per_token']:.4g} ms a prompt token + "
        f"{1e3 * cost['prefill_ms_per_pair']:.4g} for a thousand before it, decode step "
        f"{cost['decode_step_ms']:.4g} + {cost['decode_ms_per_sequence']:.4g} a sequence + "
        f"{1e3 * cost['decode_ms_per_slot']:.4g} a thousand slots, handoff {cost['handoff_ms']:.4g}, doors "
        f"{cost['door_ms']:.4g}, {cost['tokens_per_step']:.2f} tokens a step",
        "a worker: " + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in document["worker"].items()),
        f"{document['load']['requests']} requests; good: TTFT <= {document['ttft_target_ms']:g} ms, ITL <= "
        f"{document['itl_target_ms']:g} ms on average", "",
        table(COLUMNS, [_cells(row) for row in document["rows"]]),
    ]
    lines += [
        f"{_cells(row)[0]}: {row['refused']} of {row['requests']} requests were refused, {row['failed']} failed"
        for row in document["rows"] if row["refused"] or row["failed"]
    ]
    lines += [
        f"of {one['workers']} workers {one['prefill']}:{one['decode']} is the best of {one['of']} ratios: "
        f"{one['good_share']:.1%} good" for one in document["best"]
    ]
    if any("cost" in row for row in document["rows"]):
        lines += ["", table(COST_COLUMNS, [
            (f"{row['prefill']}:{row['decode']}", *(_number(value) for value in row["cost"].values()))
            for row in document["rows"]
        ])]
    if document["compared"] is not None:
        lines += ["", table(("measured beside simulated", "measured", "simulated", "ratio"), [
            (one["name"], _number(one["measured"]), _number(one["simulated"]), _number(one["ratio"]))
            for one in document["compared"]
        ])]
    if document["limits"]:
        lines += ["", *(f"limit: {sentence}" for sentence in document["limits"])]
    return "\n".join(lines)


def _cells(row: Document) -> tuple[object, ...]:
    died = f", {' and '.join(row['died'])} died" if row["died"] else ""
    return (
        f"{row['prefill']}:{row['decode']}{died}", f"{row['good_share']:.1%}", f"{row['goodput_per_s']:.3g}",
        *(_number(row[name][rank]) for name in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")),
        f"{row['cached_share']:.0%}", f"{row['prefill_busy_share']:.0%}", f"{row['decode_busy_share']:.0%}",
        f"{row['mean_batch']:.1f}", _number(row["worker_s_per_request"]), "yes" if row["front"] else "",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
