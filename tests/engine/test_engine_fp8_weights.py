"""FP8 checkpoints: what they stand for, bit for bit, and every way in which one can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pd_engine import fingerprint
from pd_engine.engine import Engine
from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_engine.explain import explain_model
from pd_engine.model.checkpoint import WEIGHTS_FILE
from pd_engine.model.config import ModelConfig, cache_layout
from support.engine_cases import (
    all_hidden,
    available_ops,
    cut,
    load_engine,
    mtp_hidden,
    new_sequence,
    random_ids,
    release,
)
from support.engine_fp8 import logits_error, set_code, write_fp8_checkpoint, write_plain_copy
from support.kernel_cases import same_bits

LINEAR = "model.layers.1.mlp.experts.3.up_proj.weight"
SCALE = f"{LINEAR}_scale_inv"
every_ops = pytest.mark.parametrize("ops", available_ops())


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "model")


@pytest.fixture(scope="module")
def plain(fp8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain_copy(fp8, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def copy(fp8: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(fp8, tmp_path / "copy"))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, path / WEIGHTS_FILE)


def states(engine: Engine, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """h and MTP's states of some tokens, computed in chunks of these sizes."""
    sequence = new_sequence(engine, random_ids(engine.config.vocab_size, sum(sizes)))
    hidden = all_hidden(engine, sequence, sizes)
    drafts = mtp_hidden(engine, sequence, hidden, cut(sum(sizes) - 1, *sizes))
    release(engine, sequence)
    return hidden, drafts


@every_ops
@pytest.mark.parametrize("prefill_form", ["absorbed", "expanded"])
def test_weights_are_what_they_stand_for(fp8: Path, plain: Path, ops: str, prefill_form: str) -> None:
    """In fp32 the states have the bits of the checkpoint that holds e4m3 · scale, blocks at the edges included."""
    ours, theirs = (states(load_engine(path, ops=ops, prefill_form=prefill_form), [40]) for path in (fp8, plain))
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])


@every_ops
@pytest.mark.parametrize("latent_dtype", ["auto", "fp8"])
def test_chunks_leave_no_trace(fp8: Path, ops: str, latent_dtype: str) -> None:
    """In bf16, over latents in bf16 and in FP8."""
    engine = load_engine(fp8, dtype="bf16", ops=ops, latent_dtype=latent_dtype)
    whole = states(engine, [50])
    for sizes in (cut(50, 1, 6, 13), cut(50, 17)):
        for some, all_rows in zip(states(engine, sizes), whole, strict=True):
            assert same_bits(some, all_rows)


def test_products_in_bf16_are_near_those_in_fp32(fp8: Path, plain: Path) -> None:
    """As near as the bf16 numbers of activations allow: the weights are not rounded again."""
    exact, _ = states(load_engine(plain), [30])
    ours, _ = states(load_engine(fp8, dtype="bf16"), [30])
    assert logits_error(ours.float(), exact) < 0.05


def test_shards_give_the_same_bits(fp8: Path, tmp_path: Path) -> None:
    """A matrix and its scales may be in different files."""
    sharded = write_fp8_checkpoint(tmp_path / "sharded", max_shard_bytes=30_000)
    assert len(list(sharded.glob("*.safetensors"))) > 10
    assert same_bits(states(load_engine(sharded), [20])[0], states(load_engine(fp8), [20])[0])


def test_weights_take_a_byte_each(fp8: Path, plain: Path) -> None:
    engine, wide = load_engine(fp8, dtype="bf16"), load_engine(plain, dtype="bf16")
    assert engine.num_parameters == wide.num_parameters
    assert engine.weights_bytes < 0.75 * wide.weights_bytes  # embedding, head, kv_b and eh_proj stay bf16
    for latent_dtype in ("auto", "fp8"):
        engine = load_engine(fp8, dtype="bf16", latent_dtype=latent_dtype)
        explained = explain_model(engine.config, num_tokens=1, latent_dtype=latent_dtype)
        assert explained.weight_bytes == engine.weights_bytes
        assert explained.cache_bytes_per_token == engine.layout.bytes_per_token


def test_how_fp8_weights_are_computed_is_part_of_the_fingerprint(
    fp8: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprints() -> list[str]:
        result = []
        for path in (fp8, plain):
            config = ModelConfig.load(path)
            layout = cache_layout(config, "bf16", 16, with_mtp=True)
            result.append(fingerprint.engine_fingerprint(
                path, config, layout, dtype="bf16", prefill_form="absorbed", numerics="n"))
        return result

    before = fingerprints()
    monkeypatch.setattr(fingerprint, "FP8_WEIGHTS", "w8a8-1")
    after = fingerprints()
    assert after[0] != before[0]
    assert after[1] == before[1]


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop(SCALE), rf"missing: {SCALE}"),
    (lambda t: t.update({SCALE: torch.ones(1, 1)}), rf"misshaped: {SCALE} \[1, 1\] instead of \[1, 2\]"),
    (lambda t: t.update({SCALE: t[SCALE].bfloat16()}), rf"not F32: {SCALE} BF16"),
    (lambda t: t.update({LINEAR: t[LINEAR].bfloat16()}), rf"not F8_E4M3: {LINEAR} BF16"),
    (lambda t: t.update({LINEAR: t[LINEAR].to(torch.float8_e5m2)}), rf"not F8_E4M3: {LINEAR} F8_E5M2"),
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
     r"not BF16 or F32: lm_head.weight F8_E4M3"),
    (lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(3, 2)}), r"unexpected: lm_head.weight_scale_inv"),
    (lambda t: t[SCALE].fill_(float("nan")), rf"{SCALE} holds NaN or infinity"),
    (lambda t: t[SCALE].neg_(), rf"{LINEAR}: scales must be finite and within 0 to 128"),
    (lambda t: t[SCALE].fill_(1000.0), rf"{LINEAR}: scales must be finite and within 0 to 128"),
    (lambda t: set_code(t[LINEAR], (71, 199), 0x7F), rf"{LINEAR}: NaN among the e4m3 numbers"),
    (lambda t: set_code(t[LINEAR], (0, 0), 0xFF), rf"{LINEAR}: NaN among the e4m3 numbers"),
])
def test_what_is_wrong_is_named(copy: Path, change: Change, message: str) -> None:
    rewrite(copy, change)
    with pytest.raises(FailedPrecondition, match=message):
        load_engine(copy)


def test_scales_of_zero_are_taken(copy: Path) -> None:
    """As of a block of zeros: another model, and a finite one."""
    before = states(load_engine(copy), [10])[0]
    rewrite(copy, lambda tensors: tensors[SCALE].zero_())
    after = states(load_engine(copy), [10])[0]
    assert bool(after.isfinite().all())
    assert not torch.equal(after, before)


def test_without_speculation_mtp_may_be_absent_scales_and_all(copy: Path) -> None:
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.2." in name])
    assert not load_engine(copy, max_speculate=0).has_mtp
    with pytest.raises(FailedPrecondition, match="without speculation the MTP layer is not needed"):
        load_engine(copy)


@pytest.mark.parametrize(("field", "value"), [
    ("quant_method", "awq"), ("fmt", "e5m2"), ("weight_block_size", [64, 64]), ("weight_block_size", None),
    ("activation_scheme", "static"),
])
def test_other_quantizations_are_refused_by_name(copy: Path, field: str, value: Any) -> None:
    data = json.loads((copy / "config.json").read_text())
    data["quantization_config"][field] = value
    (copy / "config.json").write_text(json.dumps(data))
    with pytest.raises(InvalidArgument, match=rf"quantization_config\.{field} must be .*, got"):
        load_engine(copy)


def test_a_plain_config_over_fp8_files_is_refused(copy: Path) -> None:
    data = json.loads((copy / "config.json").read_text())
    del data["quantization_config"]
    (copy / "config.json").write_text(json.dumps(data))
    with pytest.raises(FailedPrecondition, match=r"unexpected: .*_scale_inv.*; not BF16 or F32: .* F8_E4M3"):
        load_engine(copy)
