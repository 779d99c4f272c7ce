"""The engine equals transformers in fp32: logits of whole and cached prompts, MTP's logits, greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pd_engine.engine import Engine
from pd_engine.model.rope import rope_table
from pd_engine.sampling.params import MAX_SPECULATE
from pd_engine.steps.decode import decode_step
from pd_engine.steps.draft import draft_tokens
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_kernels.tolerances import TOLERANCES, check_close
from support.engine_cases import (
    CONFIGS,
    all_hidden,
    cut,
    load_engine,
    mtp_hidden,
    new_sequence,
    random_ids,
    release,
)

if TYPE_CHECKING:
    from support.engine_oracle import Oracle

NAMES = [*CONFIGS, "demo"]
NUM_TOKENS = 75  # over a tile of 64 keys


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, engines: dict[str, Engine], oracles: dict[str, Oracle]) -> None:
    """Whole, chunk by chunk and token by token over the cache: the same bits, and transformers' within tolerance."""
    engine = engines[name]
    ids = random_ids(engine.config.vocab_size, NUM_TOKENS)
    want = oracles[name].logits(ids)
    whole = None
    for sizes in ([NUM_TOKENS], cut(NUM_TOKENS, 7, 1, 29), cut(NUM_TOKENS, 1)):
        sequence = new_sequence(engine, ids)
        got = engine.main.logits(all_hidden(engine, sequence, sizes))
        release(engine, sequence)
        check_logits(torch.float32, got, want)
        whole = got if whole is None else whole
        assert torch.equal(got, whole), f"chunks of {sizes} change the logits"


@pytest.mark.parametrize("name", NAMES)
def test_mtp_logits_equal_transformers(name: str, engines: dict[str, Engine], oracles: dict[str, Oracle]) -> None:
    engine = engines[name]
    ids = random_ids(engine.config.vocab_size, NUM_TOKENS, seed=1)
    want = oracles[name].mtp_logits(ids)
    for sizes in ([NUM_TOKENS - 1], cut(NUM_TOKENS - 1, 13, 1)):
        sequence = new_sequence(engine, ids)
        hidden = all_hidden(engine, sequence, [NUM_TOKENS])
        got = engine.main.logits(mtp_hidden(engine, sequence, hidden, sizes))
        release(engine, sequence)
        check_logits(torch.float32, got, want)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_equal_transformers(name: str, engines: dict[str, Engine], oracles: dict[str, Oracle]) -> None:
    """Several drafts in a row, each from the row before; and again after a step that waited with its rows."""
    engine = engines[name]
    ids = random_ids(engine.config.vocab_size, 30, seed=4)
    sequence = new_sequence(engine, ids[:-3], speculate=4)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=20)])
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=7)])
    sequence.token_ids.append(ids[27])
    assert draft_tokens(engine, [sequence], MAX_SPECULATE) == [oracles[name].mtp_drafts(ids[:28], 4)]
    sequence.pending_hidden = all_hidden(engine, sequence, [28])[27:]
    sequence.num_computed = 28
    sequence.token_ids.append(ids[28])
    assert draft_tokens(engine, [sequence], MAX_SPECULATE) == [oracles[name].mtp_drafts(ids[:29], 4)]
    release(engine, sequence)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name: str, engines: dict[str, Engine], oracles: dict[str, Oracle]) -> None:
    engine = engines[name]
    ids = random_ids(engine.config.vocab_size, 20, seed=2)
    want = oracles[name].greedy(ids, 16)
    for speculate in (0, 2):
        assert decoded(engine, ids, 16, speculate=speculate) == want


@pytest.mark.parametrize("name", ["base", "yarn-v3", "odd", "demo"])
def test_expanded_prompts_equal_transformers(
    name: str, checkpoints: dict[str, Path], oracles: dict[str, Oracle], ops: str
) -> None:
    """`prefill_form: expanded` is the same function, up to rounding."""
    engine = load_engine(checkpoints[name], prefill_form="expanded", ops=ops)
    ids = random_ids(engine.config.vocab_size, NUM_TOKENS)
    sequence = new_sequence(engine, ids)
    hidden = all_hidden(engine, sequence, cut(NUM_TOKENS, 31))
    check_logits(torch.float32, engine.main.logits(hidden), oracles[name].logits(ids))
    check_logits(
        torch.float32, engine.main.logits(mtp_hidden(engine, sequence, hidden, [NUM_TOKENS - 1])),
        oracles[name].mtp_logits(ids),
    )


@pytest.mark.parametrize("name", ["dense-only", "demo"])
def test_bf16_is_near_transformers(
    name: str, checkpoints: dict[str, Path], oracles: dict[str, Oracle], ops: str
) -> None:
    """Only near: roundings add up through the layers, and where two experts are almost equal another one is taken."""
    engine = load_engine(checkpoints[name], dtype="bf16", ops=ops)
    ids = random_ids(engine.config.vocab_size, NUM_TOKENS)
    got = engine.main.logits(all_hidden(engine, new_sequence(engine, ids), [NUM_TOKENS]))
    check_logits(torch.bfloat16, got, oracles[name].logits(ids))


def test_latents_equal_those_of_the_formula(engines: dict[str, Engine], oracles: dict[str, Oracle]) -> None:
    """The first layer's slots hold [RMSNorm(c) | rope(k) in interleaved pairs], written out by hand."""
    engine, main = engines["yarn-v3"], oracles["yarn-v3"].main
    ids = random_ids(engine.config.vocab_size, 40)
    sequence = new_sequence(engine, ids)
    all_hidden(engine, sequence, [40])
    attention = main.model.layers[0].self_attn
    with torch.no_grad():
        x = main.model.layers[0].input_layernorm(main.model.embed_tokens(torch.tensor(ids)))
        c, k = attention.kv_a_proj_with_mqa(x).split([engine.config.kv_lora_rank, engine.config.qk_rope_head_dim], -1)
        c = attention.kv_a_layernorm(c)
    cos, sin = rope_table(engine.config, 40).unbind(1)
    pairs = torch.view_as_complex(k.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    want = torch.cat([c, torch.view_as_real(pairs).flatten(-2)], dim=-1)
    got = engine.arena.components[0][sequence.block_ids].flatten(0, 1)[:40]
    release(engine, sequence)
    check_close("latent_write", torch.float32, got, want)


def check_logits(storage: torch.dtype, got: torch.Tensor, want: torch.Tensor) -> None:
    """By the row of the table for the engine's storage dtype; both sides are float32."""
    tolerance = TOLERANCES["logits", storage]
    worst = (got - want).abs().max() / want.abs().max()
    assert got.shape == want.shape
    assert worst <= tolerance.absolute, f"logits are off by {worst:.2e} of the largest, allowed {tolerance.absolute}"


def decoded(engine: Engine, ids: list[int], count: int, *, speculate: int) -> list[int]:
    """`count` greedy tokens after the prompt."""
    sequence = new_sequence(engine, ids, speculate=speculate, max_tokens=count)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=len(ids))])
    sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        decode_step(engine, [sequence])
    release(engine, sequence)
    return sequence.generated_ids


def test_checkpoints_that_transformers_writes(tmp_path: Path) -> None:
    """Config and weights in transformers' own spelling, not in that of our generator."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=320, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, kv_lora_rank=16,
        q_lora_rank=12, qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=12, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=256, num_mtp_layers=0,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32,
            "mscale": 0.8, "mscale_all_dim": 0.8,
        },
    )
    main = DeepseekV3ForCausalLM(config).eval()
    main.save_pretrained(tmp_path)
    engine = load_engine(tmp_path)
    assert (engine.dtype, engine.has_mtp, engine.config.rope_theta) == ("fp32", False, 5000.0)
    ids = random_ids(320, NUM_TOKENS)
    got = engine.main.logits(all_hidden(engine, new_sequence(engine, ids), [NUM_TOKENS]))
    with torch.no_grad():
        check_logits(torch.float32, got, main(input_ids=torch.tensor([ids])).logits[0])
