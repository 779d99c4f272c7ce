"""What the figures are made from, the same for every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pd_ops.capacity.cache import Component
from pd_ops.capacity.weights import Ledger

ROUTED, SHARED, MTP = "routed experts", "shared experts", "MTP layer"
COPIES = "MTP's copies of embedding and head"  # in the files; a process reads neither


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """The part of a layer that scores compressed entries and keeps the best (deepseek_v4.md §4.2)."""

    num_heads: int
    tokens_per_entry: int
    num_layers: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What a checkpoint's own headers say, for the self-check. `num_bytes_gib` with one decimal."""

    num_tensors: int
    num_stored_elements: int | None = None
    num_bytes: int | None = None
    num_bytes_gib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One line about the arithmetic, with where it is from."""

    name: str
    value: float
    shown: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One model.

    Attributes:
        cache: what one request holds on every rank; the latents are shared by all heads, so no rank has less.
        packed_cache: the same in the packed layout that serving engines use, if there is one.
        handoff: what prefill has to ship for N prompt tokens, without the MTP layer's part.
        mtp_handoff: that part.
        closed_form_cache: bytes of `cache` for N tokens once more, by the family's own formula: for the self-check.
        divisors: (what, number) that the tensor-parallel size has to divide.
        num_moe_layers: without MTP's.
        mtp_cache: of the MTP layer, beside `cache`.
        residual_bytes: of one token between two layers.
        query_width: numbers of one token's queries, all heads.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_context: int
    weights: Ledger
    cache: tuple[Component, ...]
    mtp_cache: tuple[Component, ...] = ()
    packed_cache: tuple[Component, ...] = ()
    handoff: tuple[Component, ...]
    mtp_handoff: tuple[Component, ...] = ()
    closed_form_cache: Callable[[int], int]
    divisors: tuple[tuple[str, int], ...]
    num_experts: int
    num_experts_per_token: int
    num_moe_layers: int
    expert_width: int
    residual_bytes: int
    query_width: int
    indexer: Indexer | None = None
    published: Published | None = None
    facts: tuple[Fact, ...] = ()

    @property
    def loaded(self) -> Ledger:
        """What a process holds: all weights but copies."""
        return Ledger(weights=tuple(weight for weight in self.weights.weights if weight.part != COPIES))

    @property
    def cache_parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(component.part for component in self.cache))

    def illegal_because(self, tp: int) -> str | None:
        """Why this tensor-parallel size is not possible; None if it is."""
        broken = [f"{what} ({number})" for what, number in self.divisors if number % tp]
        return f"it has to divide {', '.join(broken)}" if broken else None

    def legal_tps(self, most: int = 1024) -> tuple[int, ...]:
        return tuple(tp for tp in range(1, most + 1) if self.illegal_because(tp) is None)
