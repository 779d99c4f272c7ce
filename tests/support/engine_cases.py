"""Tiny random checkpoints of every shape that the family has, and helpers that run an engine's steps by hand."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import Sequence
from pd_engine.settings import EngineSettings
from pd_engine.steps.rows import Span, build_step, token_ids
from pd_kernels.backend import OpsUnavailable, load_ops

YARN_V3 = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}
YARN_KIMI = YARN_V3 | {"factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 1.0, "beta_slow": 1.0}
YARN_NO_MSCALE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "no-q-lora-one-group": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2},
    "yarn-v3": {"rope_scaling": YARN_V3, "qk_rope_head_dim": 16},
    "yarn-kimi-no-q-lora": {"rope_scaling": YARN_KIMI, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "yarn-attention-factor": {"rope_scaling": YARN_NO_MSCALE, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "dense-only": {"first_k_dense_replace": 3, "n_group": 2},
    "eight-groups-five-heads": {
        "n_routed_experts": 16, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 5, "num_attention_heads": 5,
        "num_hidden_layers": 2,
    },
    "odd": {
        "num_attention_heads": 3, "hidden_size": 50, "qk_nope_head_dim": 10, "v_head_dim": 6, "kv_lora_rank": 22,
        "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 0, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 21,
        "vocab_size": 301, "num_hidden_layers": 2, "torch_dtype": "float32", "num_nextn_predict_layers": 1,
    },
}


def available_ops() -> list[str]:
    """The implementations of the ops that this machine can run, as the settings name them."""
    try:
        load_ops("cpu", threads=1)
    except OpsUnavailable:
        return ["reference"]
    return ["reference", "cpu"]


def write_case(folder: Path, name: str, **options: Any) -> Path:
    """The checkpoint of one of `CONFIGS` in `folder`/name."""
    path = folder / name
    write_random_checkpoint(path, CONFIGS[name], seed=1, **options)
    return path


def load_engine(path: Path, *, max_speculate: int = 8, **settings: Any) -> Engine:
    """An engine in fp32 with a small cache, on the fastest ops there are, unless the settings say otherwise."""
    chosen = {"dtype": "fp32", "cache_mib": 4} | settings
    return Engine.load(path, EngineSettings(**chosen), max_speculate=max_speculate)


def new_sequence(
    engine: Engine, token_ids: Seq[int], *, name: str = "test", num_blocks: int | None = None, speculate: int = 0,
    num_prompt_tokens: int | None = None, ending_ids: frozenset[int] = frozenset(), **params: Any,
) -> Sequence:
    """A sequence with blocks of its own for its prompt and max_tokens (64 by default); greedy by default."""
    chosen: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 0, "max_tokens": 64} | params
    sequence = Sequence(
        name=name, token_ids=list(token_ids), num_prompt_tokens=num_prompt_tokens or len(token_ids),
        params=SamplingParams(**chosen), ending_ids=ending_ids, speculate=speculate,
    )
    count = num_blocks or engine.layout.num_blocks_for(sequence.num_prompt_tokens + chosen["max_tokens"])
    sequence.block_ids = engine.pool.allocate(count, name)
    return sequence


def release(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        engine.pool.release(sequence.block_ids, sequence.name)


def release_all(engine: Engine) -> None:
    """Takes back every block, whoever holds it: what a failed test left behind."""
    for owner, blocks in engine.pool.holdings().items():
        engine.pool.release(blocks, owner)


def all_hidden(engine: Engine, sequence: Sequence, sizes: Seq[int]) -> Tensor:
    """h of every known token, [T, D], computed in chunks of the given sizes; writes the main layers' slots."""
    assert sum(sizes) == sequence.num_tokens, (sizes, sequence.num_tokens)
    hidden, start = [], 0
    for size in sizes:
        spans = [Span(sequence=sequence, start=start, count=size)]
        step = build_step(spans, engine.layout.block_size, expand_prompts=engine.expand_prompts)
        hidden.append(engine.main.forward(token_ids(spans), step, engine.main_caches))
        start += size
    return torch.cat(hidden)


def mtp_hidden(engine: Engine, sequence: Sequence, hidden: Tensor, sizes: Seq[int]) -> Tensor:
    """MTP's states for rows 1.., [T-1, D], from the main model's h, in chunks of the given sizes."""
    assert engine.mtp is not None
    assert sum(sizes) == sequence.num_tokens - 1, (sizes, sequence.num_tokens)
    states, start = [], 1
    for size in sizes:
        spans = [Span(sequence=sequence, start=start, count=size)]
        step = build_step(spans, engine.layout.block_size, expand_prompts=engine.expand_prompts)
        previous = hidden[start - 1 : start - 1 + size]
        states.append(engine.mtp.forward(token_ids(spans), previous, step, engine.mtp_cache))
        start += size
    return torch.cat(states)


def cut(total: int, *sizes: int) -> list[int]:
    """`total` in chunks of the given sizes, repeated: cut(10, 3, 1) is [3, 1, 3, 1, 2]."""
    chunks: list[int] = []
    while total:
        size = min(sizes[len(chunks) % len(sizes)], total)
        chunks.append(size)
        total -= size
    return chunks


def random_ids(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(5, vocab_size, (count,), generator=generator)]


def assert_mtp_slots_are_true(engine: Engine, sequence: Sequence) -> None:
    """Those up to num_computed_mtp: what true states make of the tokens."""
    length = sequence.num_computed_mtp
    got = engine.arena.components[-1][sequence.block_ids].flatten(0, 1)[:length].clone()
    replay = new_sequence(engine, sequence.token_ids[:length], name="replay")
    mtp_hidden(engine, replay, all_hidden(engine, replay, [length]), [length - 1])
    want = engine.arena.components[-1][replay.block_ids].flatten(0, 1)[:length]
    assert torch.equal(got[1:], want[1:])
    release(engine, replay)
