"""What ranks send each other, and what a step of a batch reads of the experts."""

from __future__ import annotations

from dataclasses import dataclass

from pd_ops.capacity.architecture import Architecture

BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """`latency_us`: of one message. Nominal, of one direction."""

    name: str
    gb_per_s: float
    latency_us: float

    def seconds(self, num_bytes: float, num_messages: int = 1) -> float:
        return num_messages * self.latency_us / 1e6 + num_bytes / (self.gb_per_s * 1e9)


# Data sheets' rates a direction; what a transfer gets of them has to be measured (pd-relay bench transfer).
LINKS = (
    Link(name="NVLink 4 (H100), 450 GB/s", gb_per_s=450.0, latency_us=2.0),
    Link(name="PCIe 5 x16, 63 GB/s", gb_per_s=63.0, latency_us=3.0),
    Link(name="400 Gb/s RDMA, 50 GB/s", gb_per_s=50.0, latency_us=5.0),
    Link(name="200 Gb/s RDMA, 25 GB/s", gb_per_s=25.0, latency_us=5.0),
    Link(name="100 Gb/s Ethernet, 12.5 GB/s", gb_per_s=12.5, latency_us=30.0),
)


def ring_all_reduce_bytes(num_bytes: int, ranks: int) -> int:
    """Sent by a rank: reduce-scatter and all-gather, (n - 1) / n of the tensor each (Patarasuk and Yuan, 2009)."""
    return 2 * (ranks - 1) * num_bytes // ranks


def ring_all_reduce_s(num_bytes: int, ranks: int, link: Link) -> float:
    """2 (n - 1) messages one after the other."""
    return link.seconds(ring_all_reduce_bytes(num_bytes, ranks), 2 * (ranks - 1)) if ranks > 1 else 0.0


def hidden_bytes(model: Architecture, batch: int) -> int:
    """What one all-reduce adds up: the batch's hidden states in FP32, as the reference does."""
    return batch * model.hidden_size * FP32_BYTES


def num_all_reduces(model: Architecture) -> int:
    """A decode step's: of the embedding, and of each layer's attention and MLP or experts."""
    return 1 + 2 * model.num_layers


def indexer_score_bytes(model: Architecture, num_queries: int, context: int, heads: int) -> int:
    """Scores of queries against all entries of a context, `heads` times, in bf16 (deepseek_v4.md §4.2)."""
    if model.indexer is None:
        return 0
    return BF16_BYTES * num_queries * (context // model.indexer.tokens_per_entry) * heads


def distinct_experts(model: Architecture, batch: int) -> float:
    """Expected number of different routed experts in one layer that a batch needs, if tokens choose independently and
    evenly: E (1 - (1 - k / E)^B)."""
    if not model.num_experts:
        return 0.0
    share = model.num_experts_per_token / model.num_experts
    return model.num_experts * (1 - (1 - share) ** batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """One layer's experts under expert parallelism, tokens of one batch: all ranks together, but for `replicated_*`.

    Attributes:
        payload_bytes: each token's hidden state once for each of its experts, in bf16.
        fp8_payload_bytes: in FP8 with an FP32 scale for 128 numbers.
        combine_bytes: the experts' answers on their way back, in bf16.
        leaving_share: of it that goes to another rank, if experts are chosen evenly.
        replicated_bytes: instead: every rank has every token, and the sums are all-reduced; sent by a rank.
    """

    payload_bytes: int
    fp8_payload_bytes: int
    combine_bytes: int
    leaving_share: float
    replicated_bytes: int


def dispatch(model: Architecture, batch: int, ranks: int) -> Dispatch:
    copies = batch * model.num_experts_per_token
    payload = copies * model.hidden_size * BF16_BYTES
    fp8 = copies * (model.hidden_size + FP32_BYTES * -(-model.hidden_size // 128))
    return Dispatch(
        payload_bytes=payload, fp8_payload_bytes=fp8, combine_bytes=payload, leaving_share=(ranks - 1) / ranks,
        replicated_bytes=ring_all_reduce_bytes(hidden_bytes(model, batch), ranks),
    )
