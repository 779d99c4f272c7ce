"""Ops that note every call, so that calls of one sort can be made again by themselves, on the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast

from pd_kernels.ops import Ops

Call = Callable[[], object]


class Sort(Enum):
    """In the order in which a layer first needs them."""

    NORMS = "norms, embedding"
    GEMM = "GEMM"  # projections, those into and out of the latents included
    WRITE = "latent write"
    ATTENTION = "attention"
    ROUTER = "router"
    EXPERTS = "experts"
    MLP = "dense MLP"


_SORTS = {
    "embed": Sort.NORMS, "rms_norm": Sort.NORMS, "add_rms_norm": Sort.NORMS, "concat_norms": Sort.NORMS,
    "linear": Sort.GEMM, "mla_queries": Sort.GEMM, "absorb_values": Sort.GEMM, "latent_write": Sort.WRITE,
    "mla_attention": Sort.ATTENTION, "mla_attention_expanded": Sort.ATTENTION, "moe_gate": Sort.ROUTER,
    "moe_experts": Sort.EXPERTS, "swiglu": Sort.MLP,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NotedCall:
    """`call` makes it again, its arguments as they were."""

    sort: Sort
    call: Call


class NotingOps:
    """Passes all calls on to other ops."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.calls: list[NotedCall] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        sort = _SORTS.get(name)
        if sort is None:
            return function

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(NotedCall(sort=sort, call=partial(function, *args, **kwargs)))
            return function(*args, **kwargs)

        return noted


def noted(ops: Ops, run: Callable[[Ops], object]) -> list[NotedCall]:
    """The calls that `run` makes."""
    noting = NotingOps(ops)
    run(cast("Ops", noting))
    return noting.calls


def by_sort(calls: Sequence[NotedCall]) -> dict[Sort, list[Call]]:
    """In the order of `Sort`, each in the order in which they came."""
    return {
        sort: chosen for sort in Sort if (chosen := [noted.call for noted in calls if noted.sort is sort])
    }
