"""What a card's memory goes to, and the smallest tensor-parallel size at which it is enough."""

from __future__ import annotations

from dataclasses import dataclass

from pd_ops.capacity.architecture import Architecture
from pd_ops.capacity.cache import total_bytes
from pd_ops.capacity.traffic import BF16_BYTES, FP32_BYTES, indexer_score_bytes

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a card shall do, and what is assumed of the runtime.

    Attributes:
        context: tokens of each request at most; `mean_context` on average.
        block_size: tokens of a block, where the cache is paged.
        chunk_tokens: prompt tokens of one step.
        index_tile: queries that the indexer scores at once.
        collectives_bytes, graphs_bytes: buffers of the communication library, captured graphs; not derived.
        margin: share of the card that stays free, for fragmentation and what is not counted.
    """

    context: int
    batch: int
    gpu_bytes: int
    mean_context: int
    block_size: int = 64
    chunk_tokens: int = 4096
    index_tile: int = 1024
    collectives_bytes: int = GIB
    graphs_bytes: int = GIB
    margin: float = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """Bytes of one rank.

    `cache_bytes` is of the whole batch at full context, allocated beforehand; `paged_cache_bytes` of blocks for the
    mean context.
    """

    tp: int
    gpu_bytes: int
    weights_bytes: int
    cache_bytes: int
    paged_cache_bytes: int
    workspace_bytes: int
    collectives_bytes: int
    graphs_bytes: int
    margin_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """What the model asks for."""
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes

    @property
    def reserved_bytes(self) -> int:
        """With what the runtime keeps beside it."""
        return self.allocated_bytes + self.collectives_bytes + self.graphs_bytes + self.margin_bytes

    @property
    def free_bytes(self) -> int:
        """Negative: it does not fit."""
        return self.gpu_bytes - self.reserved_bytes

    @property
    def paged_free_bytes(self) -> int:
        return self.free_bytes + self.cache_bytes - self.paged_cache_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0


def audit(model: Architecture, demand: Demand, tp: int) -> Audit:
    """Of one rank; `tp` legal or not."""
    blocks = -(-demand.mean_context // demand.block_size)
    components = model.cache + model.mtp_cache
    return Audit(
        tp=tp, gpu_bytes=demand.gpu_bytes, weights_bytes=model.loaded.rank_bytes(tp),
        cache_bytes=demand.batch * total_bytes(components, demand.context),
        paged_cache_bytes=demand.batch * total_bytes(components, blocks * demand.block_size),
        workspace_bytes=sum(workspace(model, demand, tp).values()),
        collectives_bytes=demand.collectives_bytes if tp > 1 else 0, graphs_bytes=demand.graphs_bytes,
        margin_bytes=round(demand.margin * demand.gpu_bytes),
    )


def workspace(model: Architecture, demand: Demand, tp: int) -> dict[str, int]:
    """Temporaries of a step, by what they are; nothing is counted twice, though not all live at once."""
    tokens = max(demand.chunk_tokens, demand.batch)
    slices = -(-model.query_width // tp)
    experts = tokens * max(1, model.num_experts_per_token)
    heads = -(-model.indexer.num_heads // tp) if model.indexer else 0
    tile = min(demand.index_tile, tokens)
    return {
        "residual stream": tokens * model.residual_bytes,
        "queries and attention's output": 2 * tokens * slices * BF16_BYTES,
        "tokens at their experts": -(-experts // tp) * (3 * model.expert_width + 2 * model.hidden_size) * BF16_BYTES,
        "logits": demand.batch * model.vocab_size * FP32_BYTES,
        "indexer scores, a tile": indexer_score_bytes(model, tile, demand.context, heads + 1),
    }


def smallest_tp(model: Architecture, demand: Demand) -> int | None:
    """The smallest legal one that fits; None: none does."""
    return next((tp for tp in model.legal_tps() if audit(model, demand, tp).fits), None)
