"""The sections of `pd-relay capacity`, each with its figures."""

from __future__ import annotations

from collections.abc import Iterator

from pd_ops.capacity.architecture import ROUTED, SHARED, Architecture
from pd_ops.capacity.audit import Audit, Demand, audit, smallest_tp, workspace
from pd_ops.capacity.cache import total_bytes
from pd_ops.capacity.figures import Figure, Section, count, in_bytes, in_gib, in_kib, in_mib, in_ms, whole
from pd_ops.capacity.traffic import (
    LINKS,
    Link,
    dispatch,
    distinct_experts,
    hidden_bytes,
    indexer_score_bytes,
    num_all_reduces,
    ring_all_reduce_bytes,
    ring_all_reduce_s,
)

CONTEXTS = (32_768, 131_072, 1_048_576)  # shown beside the one that was asked for


def sections(model: Architecture, demand: Demand, tp: int, link: Link) -> list[Section]:
    found = [
        Section(key="architecture", title="Architecture", figures=tuple(_architecture(model))),
        Section(key="weights", title="Weights, as stored", figures=tuple(_weights(model, tp))),
        Section(key="cache", title="Cache of requests, the same on every rank", figures=tuple(_cache(model, demand))),
        Section(key="layouts", title="Tensor-parallel sizes", figures=tuple(_layouts(model, demand))),
        Section(key="audit", title=f"Memory of one card at TP {tp}", figures=tuple(_audit(model, demand, tp))),
        Section(key="collectives", title=f"All-reduces at TP {tp}, batch {demand.batch}",
                figures=tuple(_collectives(model, demand, tp, link))),
        Section(key="handoff", title=f"Handoff of a prompt of {demand.context:,} tokens",
                figures=tuple(_handoff(model, demand, link))),
    ]
    if model.num_experts:
        found.insert(-1, Section(key="experts", title=f"Experts of one layer, batch {demand.batch}, {tp} ranks",
                                 figures=tuple(_experts(model, demand, tp))))
    if model.indexer:
        found.insert(4, Section(key="indexer", title=f"Indexer's temporaries for a prompt of {demand.context:,} "
                                f"tokens at TP {tp}", figures=tuple(_indexer(model, demand, tp))))
    return found


def _architecture(model: Architecture) -> Iterator[Figure]:
    yield count("layers", model.num_layers, "without the MTP layer")
    yield count("hidden size", model.hidden_size)
    yield count("vocabulary", model.vocab_size)
    yield count("longest context", model.max_context)
    for fact in model.facts:
        yield Figure(name=fact.name, value=fact.value, shown=fact.shown, source=fact.source)


def _weights(model: Architecture, tp: int) -> Iterator[Figure]:
    for part in model.weights.parts:
        ledger = model.weights.part(part)
        kinds = " and ".join(ledger.by_precision)
        how = "split" if ledger.split_bytes == ledger.num_bytes else "replicated" if not ledger.split_bytes else "both"
        scales = " with scales" if ledger.scale_bytes else ""
        yield in_gib(f"{part}, {kinds}{scales}", ledger.num_bytes, f"{ledger.num_elements:,} weights; TP: {how}",
                     decimals=6 if part == ROUTED else 5)
    total = model.weights
    for kind, num_bytes in total.by_precision.items():
        yield in_gib(f"all {kind}", num_bytes, "with scales" if kind in ("FP4", "FP8") else "")
    yield in_gib("all weights", total.num_bytes, f"{total.num_tensors:,} tensors in the files")
    yield in_gib("what TP splits", model.loaded.split_bytes, "heads, experts, MLP width, vocabulary")
    yield in_gib("what TP replicates", model.loaded.replicated_bytes, "on every rank")
    yield in_gib(f"weights of a rank at TP {tp}", model.loaded.rank_bytes(tp), "a part of the first, all of the second",
                 decimals=4)


def _cache(model: Architecture, demand: Demand) -> Iterator[Figure]:
    whole_cache = model.cache + model.mtp_cache
    span = 128 * 4  # in which every kind of entry comes out even
    per_token = (total_bytes(model.cache, 2 * span) - total_bytes(model.cache, span)) / span
    fixed = total_bytes(model.cache, 0)
    yield in_bytes("a token, all layers", per_token, "as the context grows")
    if fixed:
        yield in_mib("a request, whatever its length", fixed, "windows and compressor states")
    elif model.mtp_cache:
        yield in_bytes("a token, with the MTP layer", total_bytes(whole_cache, 1))
    for context in _contexts(model, demand):
        request = total_bytes(model.cache, context)
        parts = ", ".join(
            f"{part} {total_bytes(model.cache, context, part) / 2**20:.10g}" for part in model.cache_parts
        )
        yield in_mib(f"a request and rank at {context:,} tokens", request, f"MiB: {parts}")
        yield in_gib(f"{demand.batch} requests at {context:,} tokens", demand.batch * request, "on every rank")
        if model.packed_cache:
            packed = total_bytes(model.packed_cache, context)
            yield in_mib(f"packed, a request at {context:,} tokens", packed, "584 B a main row, 132 B an indexer row")
    if model.mtp_cache:
        yield in_mib("beside it, MTP's part of a request", total_bytes(model.mtp_cache, demand.context))


def _contexts(model: Architecture, demand: Demand) -> list[int]:
    return sorted({demand.context, *(context for context in CONTEXTS if context <= model.max_context)})


def _layouts(model: Architecture, demand: Demand) -> Iterator[Figure]:
    for tp in model.legal_tps():
        found = audit(model, demand, tp)
        verdict = "fits" if found.fits else f"{-found.free_bytes / 2**30:.1f} GiB too much"
        if model.num_experts:
            yield in_gib(f"routed experts of a card at TP {tp}", model.weights.part(ROUTED).rank_bytes(tp),
                         decimals=4)
        yield in_gib(f"weights of a card at TP {tp}", found.weights_bytes, f"with all else: {verdict}", decimals=4)
    if model.num_experts and model.weights.part(SHARED).num_bytes:
        shared = model.weights.part(SHARED)
        yield in_gib("shared experts", shared.num_bytes, "split" if shared.split_bytes else "on every rank")
    for what, number in model.divisors:
        yield count(f"TP divides the {what}", number)
    smallest = smallest_tp(model, demand)
    yield Figure(name=f"smallest legal TP on {demand.gpu_bytes / 2**30:g} GiB cards", value=smallest or 0,
                 shown=str(smallest or "none"), source="legal, and the audit below has nothing missing")


def _audit(model: Architecture, demand: Demand, tp: int) -> Iterator[Figure]:
    found: Audit = audit(model, demand, tp)
    yield in_gib("weights", found.weights_bytes)
    yield in_gib(f"cache of {demand.batch} requests, preallocated", found.cache_bytes, "full context, MTP's included")
    yield in_gib("workspace", found.workspace_bytes, "sum of the lines below")
    for name, num_bytes in workspace(model, demand, tp).items():
        if num_bytes:
            yield in_gib(f"  {name}", num_bytes)
    yield in_gib("allocated", found.allocated_bytes, "weights, cache, workspace")
    yield in_gib("collectives' buffers", found.collectives_bytes, "assumed")
    yield in_gib("graphs", found.graphs_bytes, "assumed")
    yield in_gib("margin", found.margin_bytes, f"{demand.margin:.0%} of the card")
    yield in_gib("reserved", found.reserved_bytes, "all of the above")
    yield in_gib("card", found.gpu_bytes)
    yield in_gib("left over", found.free_bytes, "fits" if found.fits else "does not fit")
    yield in_gib("cache if paged", found.paged_cache_bytes,
                 f"blocks of {demand.block_size} for {demand.mean_context:,} tokens on average")
    yield in_gib("left over if paged", found.paged_free_bytes)


def _indexer(model: Architecture, demand: Demand, tp: int) -> Iterator[Figure]:
    indexer = model.indexer
    assert indexer is not None
    heads = -(-indexer.num_heads // tp)
    size = indexer_score_bytes(model, demand.context, demand.context, heads)
    tile = min(demand.index_tile, demand.context)
    yield whole("scores of all queries, a rank's heads", size, f"[T, {heads}, T/{indexer.tokens_per_entry}] in bf16")
    yield whole("scores added up over heads", indexer_score_bytes(model, demand.context, demand.context, 1),
                f"[T, T/{indexer.tokens_per_entry}] in bf16")
    yield whole(f"in tiles of {tile:,} queries", indexer_score_bytes(model, tile, demand.context, heads + 1),
                "both, of one tile")
    yield count("entries that are kept", indexer.top_k, "a query")


def _collectives(model: Architecture, demand: Demand, tp: int, link: Link) -> Iterator[Figure]:
    size = hidden_bytes(model, demand.batch)
    steps = num_all_reduces(model)
    yield whole(f"one tensor, {demand.batch} x {model.hidden_size} in FP32", size)
    yield in_kib("ring all-reduce, sent by a rank", ring_all_reduce_bytes(size, tp), "2 (n - 1) / n of the tensor")
    yield count("all-reduces of a decode step", steps, "the embedding, and two a layer")
    yield in_mib("sent by a rank in a step", steps * ring_all_reduce_bytes(size, tp), decimals=3)
    if model.indexer:
        scores = indexer_score_bytes(model, demand.batch, demand.context, 1)
        yield in_mib("indexer scores of a step, sent by a rank",
                     model.indexer.num_layers * ring_all_reduce_bytes(scores, tp), "at full context", decimals=3)
    yield in_ms(f"one over {link.name}", ring_all_reduce_s(size, tp, link),
                f"2 (n - 1) messages of {link.latency_us:g} us, and the bytes")
    yield in_ms("a step's, one after the other", steps * ring_all_reduce_s(size, tp, link))


def _experts(model: Architecture, demand: Demand, tp: int) -> Iterator[Figure]:
    needed = distinct_experts(model, demand.batch)
    routed = model.weights.part(ROUTED).num_bytes
    sent = dispatch(model, demand.batch, tp)
    yield count("expected distinct experts", needed, "E (1 - (1 - k/E)^B)", decimals=2, of=f" of {model.num_experts}")
    yield in_gib("routed weights that a step reads", routed * needed / model.num_experts, "all layers, all ranks")
    yield in_kib("dispatch payload", sent.payload_bytes, "B x k hidden states in bf16, tokens on their own ranks")
    yield in_kib("dispatch payload in FP8", sent.fp8_payload_bytes, "with an FP32 scale for 128 numbers", decimals=1)
    yield in_kib("combine payload", sent.combine_bytes, "the answers, in bf16")
    yield count("share that leaves its rank", 100 * sent.leaving_share, "experts chosen evenly", decimals=1, of=" %")
    yield in_kib("all-reduce instead, sent by a rank", sent.replicated_bytes, "every rank has every token")


def _handoff(model: Architecture, demand: Demand, link: Link) -> Iterator[Figure]:
    size = total_bytes(model.handoff, demand.context)
    mtp = total_bytes(model.mtp_handoff, demand.context)
    yield in_mib("without MTP", size, "one copy, whatever the TP of either side")
    yield in_mib("with MTP", size + mtp)
    for one in dict.fromkeys((link, *LINKS)):
        yield in_ms(one.name, one.seconds(size + mtp), "nominal; layer by layer most of it hides behind prefill")
