"""DeepSeek-V4 Pro and Flash: deepseek_v4.md §1, §2, §7 and §8. Their figures only; nothing here runs them."""

from __future__ import annotations

from collections.abc import Iterable

from pd_ops.capacity.architecture import MTP, ROUTED, SHARED, Architecture, Fact, Indexer, Published
from pd_ops.capacity.cache import Component, Rows
from pd_ops.capacity.deepseek_v4_config import CSA, HCA, SLIDING, V4Config
from pd_ops.capacity.weights import Ledger, Precision, Weight, matrices

BF16, F32 = 2, 4
PACKED_ROW, PACKED_INDEXER_ROW = 584, 132  # 448 FP8 + 64 bf16 + 7 scales + 1; 128 FP8 + an FP32 scale (§7.2)


def deepseek_v4(name: str, config: V4Config, published: Published | None = None) -> Architecture:
    """The figures' source for one config."""
    c = config
    has_mtp = c.num_nextn_predict_layers > 0
    ring = BF16 * c.head_dim
    mtp_ring = Component(name="window", part="MTP", num_layers=1, row_bytes=ring, rows=Rows.WINDOW,
                         size=c.sliding_window)
    mtp_state = Component(name="last state of all streams", part="MTP", num_layers=1, size=1, rows=Rows.FIXED,
                          row_bytes=BF16 * c.hc_mult * c.hidden_size)
    return Architecture(
        name=name, hidden_size=c.hidden_size, vocab_size=c.vocab_size, num_layers=c.num_hidden_layers,
        max_context=c.max_position_embeddings, weights=Ledger(weights=tuple(_weights(c))), cache=_cache(c, ring, BF16),
        mtp_cache=(mtp_ring, mtp_state) if has_mtp else (), packed_cache=_packed(c), handoff=_handoff(c),
        mtp_handoff=(mtp_ring, mtp_state) if has_mtp else (),
        closed_form_cache=lambda num_tokens: closed_form_cache(c, num_tokens),
        divisors=(("output groups", c.o_groups), ("attention heads", c.num_attention_heads),
                  ("indexer heads", c.index_n_heads), ("routed experts", c.n_routed_experts),
                  ("vocabulary", c.vocab_size)),
        num_experts=c.n_routed_experts, num_experts_per_token=c.num_experts_per_tok, num_moe_layers=c.num_hidden_layers,
        expert_width=c.moe_intermediate_size, residual_bytes=F32 * c.hc_mult * c.hidden_size,
        query_width=c.num_attention_heads * c.head_dim, published=published, facts=_facts(c),
        indexer=Indexer(num_heads=c.index_n_heads, tokens_per_entry=CSA, num_layers=c.num_layers_of(CSA),
                        top_k=c.index_topk) if c.num_layers_of(CSA) else None,
    )


def _cache(c: V4Config, row: int, index_item: int, *, index_row: int | None = None) -> tuple[Component, ...]:
    """As allocated for one request: rings and states have their full size from the start (§7.1)."""
    csa, hca = c.num_layers_of(CSA), c.num_layers_of(HCA)
    index = index_row or index_item * c.index_head_dim
    csa_state = 2 * 2 * CSA * 2 * (c.head_dim + c.index_head_dim) * F32  # k and z, 8 rows, 2 halves
    hca_state = 2 * HCA * c.head_dim * F32
    rows = [
        ("window", "main", c.num_hidden_layers, row, Rows.FIXED, c.sliding_window),
        ("entries of 4 tokens", "main", csa, row, Rows.ENTRIES, CSA),
        ("entries of 128 tokens", "main", hca, row, Rows.ENTRIES, HCA),
        ("indexer keys", "indexer", csa, index, Rows.ENTRIES, CSA),
        ("compressor state, 4 tokens", "state", csa, csa_state, Rows.FIXED, 1),
        ("compressor state, 128 tokens", "state", hca, hca_state, Rows.FIXED, 1),
    ]
    return tuple(
        Component(name=name, part=part, num_layers=layers, row_bytes=size, rows=kind, size=unit)
        for name, part, layers, size, kind, unit in rows if layers
    )


def closed_form_cache(c: V4Config, num_tokens: int) -> int:
    """Bytes of a request in one formula (§7.1): rings, entries, indexer keys; 80 KiB and 512 KiB of state a layer."""
    csa, hca, width, index = c.num_layers_of(CSA), c.num_layers_of(HCA), c.head_dim, c.index_head_dim
    rows = c.sliding_window * c.num_hidden_layers + csa * (num_tokens // 4) + hca * (num_tokens // 128)
    state = csa * 128 * (width + index) + hca * 1024 * width
    return 2 * width * rows + 2 * index * csa * (num_tokens // 4) + state


def _packed(c: V4Config) -> tuple[Component, ...]:
    """Only for the widths that it is made for."""
    if (c.head_dim, c.qk_rope_head_dim, c.index_head_dim) != (512, 64, 128):
        return ()
    return _cache(c, PACKED_ROW, 1, index_row=PACKED_INDEXER_ROW)


def _handoff(c: V4Config) -> tuple[Component, ...]:
    """What is sufficient, each item necessary (§7.2)."""
    csa, hca, row = c.num_layers_of(CSA), c.num_layers_of(HCA), BF16 * c.head_dim
    both = F32 * 2 * (c.head_dim + c.index_head_dim)  # k and z of one token, one half
    rows = [
        ("window", "main", c.num_hidden_layers, row, Rows.WINDOW, c.sliding_window),
        ("entries of 4 tokens", "main", csa, row, Rows.ENTRIES, CSA),
        ("entries of 128 tokens", "main", hca, row, Rows.ENTRIES, HCA),
        ("indexer keys", "indexer", csa, BF16 * c.index_head_dim, Rows.ENTRIES, CSA),
        ("overlap with the last 4 tokens", "state", csa, CSA * both, Rows.OVERLAP, CSA),
        ("tokens after the last 4", "state", csa, 2 * both, Rows.REMAINDER, CSA),
        ("tokens after the last 128", "state", hca, F32 * 2 * c.head_dim, Rows.REMAINDER, HCA),
    ]
    return tuple(
        Component(name=name, part=part, num_layers=layers, row_bytes=size, rows=kind, size=unit)
        for name, part, layers, size, kind, unit in rows if layers
    )


def _weights(c: V4Config) -> Iterable[Weight]:
    yield from matrices("embedding and head", Precision.BF16, [
        ("embed and head", (c.vocab_size, c.hidden_size), 2, True),
    ])
    yield from matrices("norms", Precision.BF16, [("norm", (c.hidden_size,), 1, False)])
    yield from _head_streams(c, "residual streams")
    for layer, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]):
        yield from _block(c, ratio, is_hashed=layer < c.num_hash_layers, part=None)
    if c.num_nextn_predict_layers:
        yield from _block(c, c.compress_ratios[-1], is_hashed=False, part=MTP)
        yield from matrices(MTP, Precision.FP8, [("e_proj and h_proj", (c.hidden_size, c.hidden_size), 2, False)])
        yield from matrices(MTP, Precision.BF16, [("enorm, hnorm and norm", (c.hidden_size,), 3, False)])
        yield from _head_streams(c, MTP)


def _head_streams(c: V4Config, part: str) -> Iterable[Weight]:
    return matrices(part, Precision.FP32, [
        ("hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden_size), 1, False),
        ("hc_head_base", (c.hc_mult,), 1, False), ("hc_head_scale", (1,), 1, False),
    ])


def _block(c: V4Config, ratio: int, *, is_hashed: bool, part: str | None) -> Iterable[Weight]:
    """One layer; `part`: under which all of it is counted, or None."""
    hidden, mix = c.hidden_size, (2 + c.hc_mult) * c.hc_mult
    yield from matrices(part or "norms", Precision.BF16, [
        ("attn_norm and ffn_norm", (hidden,), 2, False), ("q_norm", (c.q_lora_rank,), 1, False),
        ("kv_norm", (c.head_dim,), 1, False),
    ])
    yield from matrices(part or "residual streams", Precision.FP32, [
        ("hc_fn", (mix, c.hc_mult * hidden), 2, False), ("hc_base", (mix,), 2, False), ("hc_scale", (3,), 2, False),
    ])
    attention = part or "attention"
    yield from matrices(attention, Precision.FP8, [
        ("wq_a", (c.q_lora_rank, hidden), 1, False),
        ("wq_b", (c.num_attention_heads * c.head_dim, c.q_lora_rank), 1, True),
        ("wkv", (c.head_dim, hidden), 1, False),
        ("wo_a", (c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups), 1, True),
        ("wo_b", (hidden, c.o_groups * c.o_lora_rank), 1, True),
    ])
    yield from matrices(attention, Precision.FP32, [("attn_sink", (c.num_attention_heads,), 1, True)])
    if ratio:
        yield from _compressor(c, ratio, c.head_dim, part or "compressors")
    if ratio == CSA:
        indexer = part or "indexer"
        yield from _compressor(c, ratio, c.index_head_dim, indexer)
        yield from matrices(indexer, Precision.FP8, [
            ("indexer.wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), 1, True),
        ])
        yield from matrices(indexer, Precision.BF16, [("weights_proj", (c.index_n_heads, hidden), 1, True)])
    yield from _experts(c, part, is_hashed=is_hashed)


def _compressor(c: V4Config, ratio: int, width: int, part: str) -> Iterable[Weight]:
    """Entries of 4 tokens overlap, so each token has two halves."""
    wide = 2 * width if ratio == CSA else width
    yield from matrices(part, Precision.BF16, [
        ("wkv and wgate", (wide, c.hidden_size), 2, False), ("compressor norm", (width,), 1, False),
    ])
    yield from matrices(part, Precision.FP32, [("ape", (ratio, wide), 1, False)])


def _experts(c: V4Config, part: str | None, *, is_hashed: bool) -> Iterable[Weight]:
    hidden, width, router = c.hidden_size, c.moe_intermediate_size, part or "router"
    yield from matrices(router, Precision.BF16, [("gate", (c.n_routed_experts, hidden), 1, False)])
    if is_hashed:
        yield from matrices(router, Precision.INT64, [("tid2eid", (c.vocab_size, c.num_experts_per_tok), 1, False)])
    else:
        yield from matrices(router, Precision.FP32, [("bias", (c.n_routed_experts,), 1, False)])
    routed = Precision.FP4 if c.expert_dtype == "fp4" else Precision.FP8
    for name, precision, count, split in ((ROUTED, routed, c.n_routed_experts, True),
                                          (SHARED, Precision.FP8, c.n_shared_experts, False)):
        yield from matrices(part or name, precision, [
            ("w1 and w3", (width, hidden), 2 * count, split), ("w2", (hidden, width), count, split),
        ])


def _facts(c: V4Config) -> tuple[Fact, ...]:
    sliding, csa, hca = (c.num_layers_of(ratio) for ratio in (SLIDING, CSA, HCA))
    return (
        Fact(name="attention scale", value=c.head_dim**-0.5, shown=f"{c.head_dim**-0.5:.8f}",
             source=f"1/sqrt({c.head_dim}), no YaRN part"),
        Fact(name="layers with a window only", value=sliding, shown=str(sliding), source="compress_ratios"),
        Fact(name="layers with entries of 4 tokens", value=csa, shown=str(csa), source="compress_ratios; indexed"),
        Fact(name="layers with entries of 128 tokens", value=hca, shown=str(hca), source="compress_ratios"),
        Fact(name="experts", value=c.n_routed_experts,
             shown=f"{c.n_routed_experts} + {c.n_shared_experts} experts, top-{c.num_experts_per_tok}",
             source="routed and shared"),
    )
