"""The self-check: figures against what files say of themselves, and against sums that must come out even."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pd_ops.capacity.architecture import Architecture
from pd_ops.capacity.audit import Demand, audit
from pd_ops.capacity.cache import total_bytes
from pd_ops.capacity.traffic import distinct_experts, hidden_bytes, ring_all_reduce_bytes
from pd_ops.output import Document

LENGTHS = (1, 3, 4, 127, 128, 129, 4096, 32_768, 131_072)  # where kinds of entries begin and end


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    expected: float
    found: float

    @property
    def passed(self) -> bool:
        return self.expected == self.found

    def to_json(self) -> Document:
        return {"name": self.name, "expected": self.expected, "found": self.found, "passed": self.passed}


def checks(model: Architecture, demand: Demand, tp: int) -> list[Check]:
    return [*_files(model), *_weights(model), *_cache(model, demand), *_traffic(model, demand, tp)]


def _files(model: Architecture) -> Iterator[Check]:
    published, ledger = model.published, model.weights
    if published is None:
        return
    yield Check(name="tensors, as the published files have", expected=published.num_tensors, found=ledger.num_tensors)
    if published.num_stored_elements is not None:
        yield Check(name="their elements", expected=published.num_stored_elements, found=ledger.num_stored_elements)
    if published.num_bytes is not None:
        yield Check(name="their bytes", expected=published.num_bytes, found=ledger.num_bytes)
    if published.num_bytes_gib is not None:
        yield Check(name="their GiB", expected=published.num_bytes_gib, found=round(ledger.num_bytes / 2**30, 1))


def _weights(model: Architecture) -> Iterator[Check]:
    total = model.weights
    yield Check(name="parts add up to all weights", expected=total.num_bytes,
                found=sum(total.part(part).num_bytes for part in total.parts))
    yield Check(name="precisions add up to all weights", expected=total.num_bytes,
                found=sum(total.by_precision.values()))
    loaded = model.loaded
    for tp in model.legal_tps():
        rounded = -loaded.split_bytes % tp
        yield Check(name=f"ranks add up at TP {tp}", found=tp * loaded.rank_bytes(tp),
                    expected=loaded.split_bytes + rounded + tp * loaded.replicated_bytes)


def _cache(model: Architecture, demand: Demand) -> Iterator[Check]:
    for context in dict.fromkeys((*LENGTHS, demand.context)):
        yield Check(name=f"cache of {context} tokens, in closed form", expected=model.closed_form_cache(context),
                    found=total_bytes(model.cache, context))
        yield Check(name=f"a handoff of {context} tokens is no more than the cache", expected=True,
                    found=total_bytes(model.handoff, context) <= total_bytes(model.cache, context))


def _traffic(model: Architecture, demand: Demand, tp: int) -> Iterator[Check]:
    size = hidden_bytes(model, demand.batch)
    yield Check(name="what ranks send in an all-reduce, but for parts of a byte", expected=True,
                found=0 <= 2 * (tp - 1) * size - tp * ring_all_reduce_bytes(size, tp) < tp)
    if model.num_experts:
        needed = distinct_experts(model, demand.batch)
        most = min(model.num_experts, demand.batch * model.num_experts_per_token)
        yield Check(name="distinct experts are possible", expected=True,
                    found=model.num_experts_per_token - 1e-9 <= needed <= most + 1e-9)
    card = audit(model, demand, tp)
    yield Check(name="the audit adds up to the card", expected=card.gpu_bytes,
                found=card.reserved_bytes + card.free_bytes)
