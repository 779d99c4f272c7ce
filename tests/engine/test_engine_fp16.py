"""fp16, with a residual stream that is kept smaller: near fp32, beyond fp16's range, and the same in any company."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kv_transfer.compatibility import check_compatible
from pd_engine.engine import Engine
from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_engine.explain import explain_model
from pd_engine.model.checkpoint import WEIGHTS_FILE
from pd_engine.model.config import ModelConfig, cache_layout
from pd_engine.model.fp16_guard import NO_GUARD, Fp16Guard, fp16_guard
from pd_engine.model.moe import gate_config
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.state import export_hidden, import_hidden
from pd_kernels.ops import GateConfig
from pd_kernels.reference import ReferenceOps
from pd_kernels.tolerances import TOLERANCES
from support.engine_cases import all_hidden, load_engine, mtp_hidden, new_sequence, random_ids, release
from support.engine_play import Request, alone, together
from support.engine_v3_config import DEEPSEEK_V3

NUM_TOKENS = 70  # over a tile of 64 keys
FP16_MAX = 65_504.0


def load(path: Path, dtype: str = "fp16", **settings: Any) -> Engine:
    return load_engine(path, dtype=dtype, ops="reference", **settings)


def both_logits(engine: Engine, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    """(the main model's, MTP's) of a random prompt."""
    sequence = new_sequence(engine, random_ids(engine.config.vocab_size, num_tokens))
    hidden = all_hidden(engine, sequence, [num_tokens])
    drafting = mtp_hidden(engine, sequence, hidden, [num_tokens - 1])
    release(engine, sequence)
    return engine.main.logits(hidden), engine.main.logits(drafting)


def check_near(got: Tensor, want: Tensor) -> None:
    worst = (got - want).abs().max() / want.abs().max()
    assert worst <= TOLERANCES["logits", torch.float16].absolute, f"logits are off by {worst:.2e} of the largest"


def with_guard(engine: Engine, guard: Fp16Guard) -> Engine:
    """The same engine with another guard, whatever its dtype."""
    engine.main.block = replace(engine.main.block, guard=guard, gate=gate_config(engine.config, guard))
    return engine


@pytest.mark.parametrize("name", ["base", "dense-only", "no-q-lora-one-group", "odd"])
def test_logits_are_near_those_of_fp32(name: str, checkpoints: dict[str, Path]) -> None:
    half, full = (both_logits(load(checkpoints[name], dtype)) for dtype in ("fp16", "fp32"))
    for got, want in zip(half, full, strict=True):
        check_near(got, want)


def test_expanded_prompts(checkpoints: dict[str, Path]) -> None:
    for got, want in zip(
        both_logits(load(checkpoints["base"], prefill_form="expanded")),
        both_logits(load(checkpoints["base"], "fp32")), strict=True,
    ):
        check_near(got, want)


# What the guard scales, each left out in turn (deepseek_v3.md §5).


@pytest.fixture(scope="module")
def by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A factor that is a power of two, an eps that counts, and both kinds of layers in the middle."""
    path = tmp_path_factory.mktemp("fp16") / "by four"
    fields = {"routed_scaling_factor": 4.0, "rms_norm_eps": 0.25, "torch_dtype": "float32"}
    write_random_checkpoint(path, fields, seed=2)
    return path


class LeavingOut(ReferenceOps):
    """Ops of a guarded model that leave one scale out."""

    def __init__(self, engine: Engine, left_out: str) -> None:
        super().__init__()
        layers = [*engine.main.weights.layers, *([engine.main.weights.mtp.layer] if engine.main.weights.mtp else [])]
        self._post_norms = {id(layer.post_norm) for layer in layers}
        self._left_out = left_out
        self._factor = engine.main.block.guard.factor

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, x_scale: float = 1.0,
        residual_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        added = "attention" if id(weight_D) in self._post_norms else "dense"
        return super().add_rms_norm(
            x_TD, residual_TD, weight_D, eps * self._factor**2 if self._left_out == "eps" else eps,
            x_scale=1.0 if self._left_out == added else x_scale,
            residual_scale=1.0 if self._left_out == "residual" else residual_scale,
        )

    def moe_gate(self, x_TD: Tensor, weight: Tensor, bias_X: Tensor, config: GateConfig) -> tuple[Tensor, Tensor]:
        scale = config.scale * (self._factor if self._left_out == "routed" else 1.0)
        return super().moe_gate(x_TD, weight, bias_X, replace(config, scale=scale))

    def moe_experts(self, *arguments: Any, shared_scale: float = 1.0) -> Tensor:
        return super().moe_experts(*arguments, shared_scale=1.0 if self._left_out == "shared" else shared_scale)


def test_in_exact_arithmetic_the_guard_changes_no_bit(by_four: Path) -> None:
    """In fp32 scales that are powers of two round nothing: a scale, or an eps, that is missing somewhere would show."""
    plain = both_logits(load(by_four, "fp32"))
    guarded = both_logits(with_guard(load(by_four, "fp32"), Fp16Guard(factor=4.0)))
    assert all(torch.equal(got, want) for got, want in zip(guarded, plain, strict=True))


@pytest.mark.parametrize("left_out", ["nothing", "residual", "attention", "dense", "routed", "shared", "eps"])
def test_every_scale_is_needed(by_four: Path, left_out: str) -> None:
    """By the main model; and by MTP's layer, but for the dense MLP, which it does not have."""
    plain, engine = both_logits(load(by_four, "fp32")), with_guard(load(by_four, "fp32"), Fp16Guard(factor=4.0))
    changed = both_logits(engine.with_ops(LeavingOut(engine, left_out)))
    sequence = new_sequence(engine, random_ids(engine.config.vocab_size, NUM_TOKENS))
    hidden = all_hidden(engine, sequence, [NUM_TOKENS])  # with all scales: MTP's own part alone
    view = engine.with_ops(LeavingOut(engine, left_out))
    own = view.main.logits(mtp_hidden(view, sequence, hidden, [NUM_TOKENS - 1]))
    errors = [((got - want).abs().max() / want.abs().max()).item()
              for got, want in ((changed[0], plain[0]), (own, plain[1]))]
    assert (errors[0] > 0.02) == (left_out != "nothing"), errors
    assert (errors[1] > 0.02) == (left_out not in ("nothing", "dense")), errors


def test_dtypes_other_than_fp16_have_no_guard() -> None:
    config = ModelConfig.parse(DEEPSEEK_V3)
    assert fp16_guard(config, "bf16") == fp16_guard(config, "fp32") == NO_GUARD
    assert fp16_guard(config, "fp16").factor == 2.5
    assert fp16_guard(config, "fp16").eps(1e-6) == pytest.approx(1.6e-7)
    assert fp16_guard(config.model_copy(update={"routed_scaling_factor": 0.5}), "fp16") == NO_GUARD


# A residual stream beyond fp16's range.


class Watching(ReferenceOps):
    """Keeps the largest number of the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def add_rms_norm(self, *arguments: Any, **scales: float) -> tuple[Tensor, Tensor]:
        result = super().add_rms_norm(*arguments, **scales)
        self.largest = max(self.largest, result[1].abs().max().item())
        return result


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embedding and all layers' outputs, MTP's too, have some 10,000 in a channel; their sum more than fp16 holds."""
    path = tmp_path_factory.mktemp("fp16") / "large"
    write_random_checkpoint(path, {"torch_dtype": "float32"}, seed=7)
    tensors = load_file(path / WEIGHTS_FILE)
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight", "eh_proj.weight")):
            tensor *= 10_000
    save_file(tensors, path / WEIGHTS_FILE)
    return path


def test_activations_that_overflow_fp16_do_not_with_the_guard(large: Path) -> None:
    exact, ops = load(large, "fp32"), Watching()
    want = both_logits(exact.with_ops(ops))
    assert FP16_MAX < ops.largest < 2.5 * FP16_MAX
    for got, expected in zip(both_logits(load(large)), want, strict=True):
        check_near(got, expected)
    unguarded = both_logits(with_guard(load(large), NO_GUARD))
    assert not unguarded[0].isfinite().all()


def test_weights_beyond_fp16_are_refused_by_name(large: Path, tmp_path: Path) -> None:
    tensors = load_file(large / WEIGHTS_FILE)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name][2, 5] = -1e5
    broken = tmp_path / "model"
    broken.mkdir()
    for file in large.iterdir():
        if file.name != WEIGHTS_FILE:
            (broken / file.name).write_bytes(file.read_bytes())
    save_file(tensors, broken / WEIGHTS_FILE)
    with pytest.raises(FailedPrecondition, match=rf"{name} holds numbers up to 100000, and fp16 none beyond 65504"):
        load(broken)
    assert load(broken, "fp32").dtype == "fp32"


# In company, with drafts, handed over.


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most drafts are accepted."""
    path = tmp_path_factory.mktemp("fp16") / "drafting"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=5, layer_scale=0.15)
    return path


def test_chunks_and_drafts_and_company_leave_no_trace(drafting: Path) -> None:
    """Tokens, logprob bits and the bytes of the prompt's slots."""
    engine = load(drafting)
    ids = tuple(random_ids(engine.config.vocab_size, 40, seed=1))
    sampled = Request(prompt=ids, params={"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 8, "logprobs": 1})
    greedy = Request(prompt=ids[:7], params={"max_tokens": 9, "logprobs": 2})
    plain = [alone(engine, request) for request in (sampled, greedy)]
    assert alone(engine, sampled, speculate=2, sizes=[17, 1, 22]) == plain[0]
    assert alone(engine, greedy, speculate=3) == plain[1]
    assert together(engine, [sampled, greedy], speculate=[1, 2]) == plain


def test_greedy_tokens_are_those_of_fp32(drafting: Path) -> None:
    request = Request(prompt=tuple(random_ids(320, 20, seed=2)), params={"max_tokens": 12})
    half, full = (alone(load(drafting, dtype), request, speculate=1) for dtype in ("fp16", "fp32"))
    assert [token.token_id for token in half.tokens] == [token.token_id for token in full.tokens]


def test_a_sequence_goes_on_in_another_engine(drafting: Path) -> None:
    """Latents and the last h as the bytes that a handoff moves."""
    source, destination = load(drafting), load(drafting)
    assert source.fingerprint == destination.fingerprint
    ids = random_ids(320, 37, seed=3)
    want = alone(source, Request(prompt=tuple(ids), params={"max_tokens": 10}), speculate=1)
    there = new_sequence(source, ids, speculate=1, max_tokens=10)
    prefill_step(source, [Chunk(sequence=there, num_tokens=len(ids))])
    [first] = sample_first(source, [there])
    here = new_sequence(destination, [*ids, first.token_id], num_prompt_tokens=len(ids), speculate=1, max_tokens=10)
    for component in range(len(source.layout.components)):
        for ours, theirs in zip(here.block_ids, there.block_ids, strict=False):
            destination.arena.piece(component, ours)[:] = source.arena.piece(component, theirs)
    here.num_computed, here.num_computed_mtp = there.num_computed, there.num_computed_mtp
    raw = export_hidden(there)
    assert len(raw) == 2 * source.config.hidden_size
    here.pending_hidden = import_hidden(raw, hidden_size=source.config.hidden_size, dtype="fp16")
    while here.finish_reason() is None:
        decode_step(destination, [here])
    assert here.generated_ids == [token.token_id for token in want.tokens]
    release(source, there)
    release(destination, here)


def test_latents_are_fp16_with_a_layout_and_fingerprint_of_their_own(drafting: Path) -> None:
    half, brain = load(drafting), load(drafting, "bf16")
    assert {component.dtype for component in half.layout.components} == {"fp16"}
    assert {slots.dtype for slots in half.arena.components} == {torch.float16}
    assert half.layout.bytes_per_token == brain.layout.bytes_per_token
    assert half.fingerprint != brain.fingerprint
    with pytest.raises(FailedPrecondition, match=r"dtype of component layers\.0 is fp16 at p .* and bf16 at d"):
        check_compatible(
            source="p", source_fingerprint=half.fingerprint, source_layout=half.layout, source_checksums=True,
            destination="d", destination_fingerprint=half.fingerprint, destination_layout=brain.layout,
            destination_checksums=True)


def test_deepseek_v3_in_fp16_is_explained() -> None:
    config = ModelConfig.parse(DEEPSEEK_V3)
    half, brain = (explain_model(config, num_tokens=16, dtype=dtype) for dtype in ("fp16", "bf16"))
    assert (half.residual_factor, brain.residual_factor) == (2.5, 1.0)
    assert half.cache_bytes_per_token == brain.cache_bytes_per_token == 62 * 1152
    assert half.weight_bytes == brain.weight_bytes
    assert half.stages[0].output == "[T, 7168] fp16"
    assert cache_layout(config, "fp16", 16, with_mtp=True).bytes_per_token == 62 * 1152


# What does not go together.


def test_fp8_latents_are_refused(drafting: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_random_checkpoint(path, {"kv_lora_rank": 128})
    with pytest.raises(InvalidArgument, match=r"latent_dtype: fp8 does not go with engine\.dtype fp16"):
        load(path, latent_dtype="fp8")


def test_on_a_cpu_it_computes_with_the_reference_and_says_so(
    drafting: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FailedPrecondition, match=r"engine\.ops: cpu: the compiled CPU ops compute in bf16 and fp32"):
        load_engine(drafting, dtype="fp16", ops="cpu")
    caplog.set_level(logging.INFO, logger="pd_kernels.backend")
    engine = load_engine(drafting, dtype="fp16", ops="auto")
    assert engine.ops.name == "reference"
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the torch reference serves" in said and "the compiled CPU ops compute in bf16 and fp32" in said
