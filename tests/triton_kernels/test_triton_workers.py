"""A prefill and a decode worker over the Triton kernels: tokens, logprob bits and blocks of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_engine.engine import Engine
from pd_engine.generate import generate
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sampling.params import SamplingParams
from pd_engine.settings import EngineSettings
from pd_engine.text.tokenizer import Tokenizer
from support import player as player_module
from support import triton_shim  # noqa: F401  (before any module with kernels)
from support.cluster import SECRET, local_workers
from support.engine_cases import random_ids
from support.player import Player, sampling_message

TINY = {
    "hidden_size": 64, "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_attention_heads": 2, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "vocab_size": 320,
}
ENGINE: dict[str, Any] = {"ops": "triton", "dtype": "fp32", "cache_mib": 1, "block_size": 4, "chunk_tokens": 5}
PARAMS = SamplingParams(temperature=0.8, top_p=1.0, top_k=-1, seed=5, max_tokens=3, ignore_eos=True, logprobs=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_a_handoff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """In two chunks, with a draft. An interpreted step takes seconds."""
    monkeypatch.setattr(player_module, "CALL_TIMEOUT_S", 600.0)
    model = tmp_path / "model"
    write_random_checkpoint(model, TINY, seed=3, layer_scale=0.15)
    tokenizer, ids = Tokenizer.load(model), random_ids(300, 7)
    settings = {"model": str(model), "engine": ENGINE, "decode": {"adaptive_speculation": False},
                "transfer": {"transport": transport, "lease_ms": 600_000}}
    async with local_workers(settings) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        copy = await player.run(ids, sampling_message(PARAMS, [], 1))
        await player.until_idle()
        await player.close()
    engine = Engine.load(model, EngineSettings(**ENGINE), max_speculate=1)
    assert engine.ops.name == "triton"
    expected = generate(engine, tokenizer, ids, PARAMS, speculate=1, checksums=True)
    assert copy.failure is None
    assert copy.token_ids == list(expected.token_ids)
    received = [copy.logprobs[index] for index in sorted(copy.logprobs)]
    assert received == [(item.logprob, item.top) for item in expected.logprobs]
    assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    assert copy.handoff is not None
    assert tuple(copy.handoff.block_checksums) == expected.prompt_checksums
