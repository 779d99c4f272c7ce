"""A whole model over the Triton kernels: the same engine, cache, drafting and sampling as with any other ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_kernels.tolerances import check_close
from support import triton_shim  # noqa: F401  (before any module with kernels)
from support.engine_cases import all_hidden, load_engine, mtp_hidden, new_sequence, random_ids, release
from support.engine_fp8 import write_fp8_checkpoint
from support.engine_play import Request, alone, together

TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 64,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
PROMPT = tuple(random_ids(300, 9, seed=1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer, one with experts, and MTP's; most drafts are accepted."""
    path = tmp_path_factory.mktemp("triton") / "model"
    write_random_checkpoint(path, TINY, seed=3, layer_scale=0.15)
    return path


def on_triton(checkpoint: Path, **settings: object) -> Engine:
    engine = load_engine(checkpoint, ops="triton", **settings)
    assert engine.ops.name == "triton"
    assert engine.arena.is_staged
    return engine


def states(engine: Engine, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """(logits of all rows, MTP's states) of the prompt, in chunks."""
    sequence = new_sequence(engine, PROMPT)
    hidden = all_hidden(engine, sequence, sizes)
    drafting = mtp_hidden(engine, sequence, hidden, [len(PROMPT) - 1])
    release(engine, sequence)
    return engine.main.logits(hidden), drafting


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_are_those_of_the_reference(checkpoint: Path, dtype: str) -> None:
    ours, drafts = states(on_triton(checkpoint, dtype=dtype), [len(PROMPT)])
    theirs, expected_drafts = states(load_engine(checkpoint, dtype=dtype, ops="reference"), [len(PROMPT)])
    storage = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    check_close("logits", storage, ours, theirs)
    check_close("logits", storage, drafts.float(), expected_drafts.float())


def test_expanded_prompts(checkpoint: Path) -> None:
    ours, _ = states(on_triton(checkpoint, prefill_form="expanded"), [len(PROMPT)])
    theirs, _ = states(load_engine(checkpoint, ops="reference", prefill_form="expanded"), [len(PROMPT)])
    check_close("logits", torch.float32, ours, theirs)


@pytest.mark.slow
def test_logits_of_fp8_weights_and_latents(tmp_path: Path) -> None:
    path = write_fp8_checkpoint(tmp_path / "model")
    for settings in ({}, {"dtype": "bf16", "latent_dtype": "fp8"}):
        ours, _ = states(on_triton(path, **settings), [len(PROMPT)])
        theirs, _ = states(load_engine(path, ops="reference", **settings), [len(PROMPT)])
        check_close("logits", torch.bfloat16 if settings else torch.float32, ours, theirs)


@pytest.mark.slow
def test_chunks_and_drafts_and_company_leave_no_trace(checkpoint: Path) -> None:
    """Tokens, logprob bits and the bytes of the prompt's slots."""
    engine = on_triton(checkpoint, dtype="bf16")
    params = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 3, "logprobs": 1}
    request, other = Request(prompt=PROMPT, params=params), Request(prompt=PROMPT[:3], params={"max_tokens": 2})
    plain = alone(engine, request)
    assert alone(engine, request, speculate=2, sizes=[4, 1, 4]) == plain
    assert together(engine, [other, request], speculate=[1, 1])[1] == plain


def test_greedy_tokens_are_those_of_the_reference(checkpoint: Path) -> None:
    request = Request(prompt=PROMPT, params={"max_tokens": 3})
    ours = alone(on_triton(checkpoint), request, speculate=1)
    theirs = alone(load_engine(checkpoint, ops="reference"), request)
    assert [token.token_id for token in ours.tokens] == [token.token_id for token in theirs.tokens]
