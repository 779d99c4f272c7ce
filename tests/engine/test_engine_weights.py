"""Weights: sharded or not, bf16 or fp32, and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.errors import FailedPrecondition, InvalidArgument, NotFound, PdRelayError, ResourceExhausted
from pd_engine.model.checkpoint import INDEX_FILE, WEIGHTS_FILE
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.settings import EngineSettings
from support.engine_cases import all_hidden, load_engine, new_sequence, random_ids, write_case

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def copy(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(checkpoints["base"], tmp_path / "copy"))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, path / WEIGHTS_FILE)


def hidden(engine: Engine) -> Tensor:
    sequence = new_sequence(engine, random_ids(engine.config.vocab_size, 20))
    return all_hidden(engine, sequence, [20])


def test_shards_give_the_same_bits(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_case(tmp_path, "base", max_shard_bytes=64_000)
    assert len(list(path.glob("*.safetensors"))) > 5
    assert torch.equal(hidden(load_engine(path)), hidden(load_engine(checkpoints["base"])))


def test_norms_may_be_fp32_in_a_bf16_checkpoint(copy: Path, checkpoints: dict[str, Path]) -> None:
    """As DeepSeek-V3.2 ships them."""

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.float() for name, tensor in tensors.items() if "norm" in name})

    rewrite(copy, widen)
    assert torch.equal(hidden(load_engine(copy)), hidden(load_engine(checkpoints["base"])))


def test_dtype_auto_is_the_checkpoints(checkpoints: dict[str, Path]) -> None:
    assert load_engine(checkpoints["base"], dtype="auto").dtype == "bf16"
    assert load_engine(checkpoints["odd"], dtype="auto").dtype == "fp32"


def test_mtp_is_left_out_without_speculation(checkpoints: dict[str, Path]) -> None:
    with_mtp, without = load_engine(checkpoints["base"]), load_engine(checkpoints["base"], max_speculate=0)
    assert with_mtp.has_mtp
    assert not without.has_mtp
    assert len(without.layout.components) == len(with_mtp.layout.components) - 1
    assert without.num_parameters < with_mtp.num_parameters
    assert torch.equal(hidden(with_mtp), hidden(without))


def test_an_mtp_layer_that_is_not_there(copy: Path, checkpoints: dict[str, Path]) -> None:
    """Some conversions drop it and keep the config: they serve without speculation. Half a layer never does."""
    names = [name for name in load_file(copy / WEIGHTS_FILE) if name.startswith("model.layers.3.")]
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in names[1:]])
    for max_speculate in (0, 1):
        with pytest.raises(FailedPrecondition, match=r"missing: model\.layers\.3\."):
            load_engine(copy, max_speculate=max_speculate)
    rewrite(copy, lambda tensors: tensors.pop(names[0]))
    with pytest.raises(FailedPrecondition, match="without speculation the MTP layer is not needed"):
        load_engine(copy)
    engine = load_engine(copy, max_speculate=0)
    assert not engine.has_mtp
    assert torch.equal(hidden(engine), hidden(load_engine(checkpoints["base"])))


def test_checkpoints_without_mtp_copies(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    engine = load_engine(write_case(tmp_path, "base", with_mtp_copies=False))
    assert engine.has_mtp
    assert engine.num_parameters == load_engine(checkpoints["base"]).num_parameters


def test_mtp_copies_that_differ_are_refused(copy: Path) -> None:
    name = "model.layers.3.shared_head.head.weight"
    rewrite(copy, lambda tensors: tensors[name].view(-1)[7:8].add_(1))
    with pytest.raises(FailedPrecondition, match=r"shared_head.head.weight must equal lm_head.weight"):
        load_engine(copy)
    assert not load_engine(copy, max_speculate=0).has_mtp


def test_no_router_biases(tmp_path: Path) -> None:
    """Without groups they are zero; with groups implementations disagree on the score of one, so it is refused."""
    engine = load_engine(write_case(tmp_path, "no-q-lora-one-group", with_router_biases=False))
    assert hidden(engine).isfinite().all()
    with pytest.raises(FailedPrecondition, match=r"e_score_correction_bias"):
        load_engine(write_case(tmp_path, "base", with_router_biases=False))


def test_all_that_is_wrong_is_named_at_once(copy: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors[EXPERT]
        tensors["model.layers.9.mystery.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].contiguous()
        tensors["model.norm.weight"] = tensors["model.norm.weight"].half()

    rewrite(copy, spoil)
    with pytest.raises(FailedPrecondition) as caught:
        load_engine(copy)
    message = caught.value.message
    assert f"missing: {EXPERT}" in message
    assert "unexpected: model.layers.9.mystery.weight" in message
    assert "misshaped: lm_head.weight [320, 63] instead of [320, 64]" in message
    assert "model.norm.weight F16" in message


def test_long_lists_are_cut(copy: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    rewrite(copy, spoil)
    with pytest.raises(FailedPrecondition, match=r"and 62 more") as caught:
        load_engine(copy)
    assert len(caught.value.message) < 2000


def test_fp8_in_a_plain_checkpoint_is_refused(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)}))
    with pytest.raises(FailedPrecondition, match=r"not BF16 or F32: .*experts.3.up_proj.weight F8_E4M3"):
        load_engine(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [
    EXPERT, "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight",
    "model.layers.0.self_attn.kv_b_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.3.eh_proj.weight",
])
def test_weights_that_are_not_finite_are_refused(copy: Path, name: str, value: float) -> None:
    rewrite(copy, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(FailedPrecondition, match=rf"^{name} holds NaN or infinity, .*: 1 of \d+ numbers, the first at"):
        load_engine(copy)


def test_weights_that_are_not_finite_in_the_engines_dtype(copy: Path) -> None:
    """Large ones that fp32 holds and bf16 does not are refused there; ones that only add up to infinity never are."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    rewrite(copy, lambda tensors: tensors.update({EXPERT: torch.full_like(tensors[EXPERT], 3e38, dtype=torch.float32)}))
    assert load_engine(copy, dtype="bf16")
    rewrite(copy, lambda tensors: tensors[EXPERT].fill_(torch.finfo(torch.float32).max))
    assert load_engine(copy, dtype="fp32")
    with pytest.raises(FailedPrecondition, match=f"{EXPERT} holds NaN or infinity, read as bfloat16"):
        load_engine(copy, dtype="bf16")


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 5000, 60_000, -1])
def test_truncated_files_are_refused(copy: Path, num_bytes: int) -> None:
    whole = (copy / WEIGHTS_FILE).read_bytes()
    (copy / WEIGHTS_FILE).write_bytes(whole[:num_bytes])
    with pytest.raises(FailedPrecondition, match="truncated"):
        load_engine(copy)


@pytest.mark.parametrize(
    "content",
    [b"\x00" * 64, b"\xff" * 64, b"GGUF" * 40, b"\x10\x00\x00\x00\x00\x00\x00\x00not a header at all"],
)
def test_files_that_are_no_safetensors(copy: Path, content: bytes) -> None:
    (copy / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(FailedPrecondition):
        load_engine(copy)


def test_config_of_another_model(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5, "kv_lora_rank": 64}))
    with pytest.raises(FailedPrecondition, match=r"missing: .*misshaped"):
        load_engine(copy)


def test_no_weights(copy: Path) -> None:
    (copy / WEIGHTS_FILE).unlink()
    with pytest.raises(NotFound, match="no weights"):
        load_engine(copy)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ("{", InvalidArgument),
        ("[]", InvalidArgument),
        ('{"weight_map": {}}', InvalidArgument),
        ('{"weight_map": []}', InvalidArgument),
        ('{"weight_map": {"lm_head.weight": 7}}', InvalidArgument),
        ('{"weight_map": {"lm_head.weight": "../copy/model-00001-of-00002.safetensors"}}', InvalidArgument),
        ('{"weight_map": {"lm_head.weight": "/etc/passwd"}}', InvalidArgument),
        ('{"weight_map": {"lm_head.weight": ".."}}', InvalidArgument),
        ('{"weight_map": {"lm_head.weight": "model-00009-of-00009.safetensors"}}', NotFound),
    ],
)
def test_broken_index(tmp_path: Path, index: str, error: type[PdRelayError]) -> None:
    path = write_case(tmp_path, "base", max_shard_bytes=400_000)
    (path / INDEX_FILE).write_text(index)
    with pytest.raises(error):
        load_engine(path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    path = write_case(tmp_path, "base", max_shard_bytes=400_000)
    index = json.loads((path / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        name for name in files if name != index["weight_map"]["model.norm.weight"]
    )
    (path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(FailedPrecondition, match=r"disagree about model\.norm\.weight"):
        load_engine(path)


def test_a_missing_shard(tmp_path: Path) -> None:
    path = write_case(tmp_path, "base", max_shard_bytes=400_000)
    victim = sorted(path.glob("*.safetensors"))[-1]
    victim.unlink()
    with pytest.raises(NotFound, match=victim.name):
        load_engine(path)


def test_settings_that_do_not_fit(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["base"]
    with pytest.raises(InvalidArgument, match=r"cache_mib: 1 MiB do not hold one block"):
        load_engine(checkpoints["demo"], cache_mib=1, block_size=1024)
    with pytest.raises(InvalidArgument, match=r"max_context_length must be at most .* \(1024\), got 1025"):
        load_engine(path, max_context_length=1025)
    with pytest.raises(ResourceExhausted, match=r"cache 1073741824 MiB"):
        load_engine(path, cache_mib=1 << 30)
    with pytest.raises(ResourceExhausted, match="what comes later 1073741824 MiB"):
        Engine.load(path, EngineSettings(), max_speculate=0, also_needed={"what comes later": 1 << 50})


def test_a_context_that_no_memory_holds(tmp_path: Path) -> None:
    """The config is well-formed, but its table of angles alone would take 4 TiB."""
    path = tmp_path / "model"
    write_random_checkpoint(path, {"qk_rope_head_dim": 1024, "max_position_embeddings": 1 << 30})
    with pytest.raises(ResourceExhausted, match="table of angles 4194304 MiB"):
        load_engine(path)
    assert load_engine(path, max_context_length=64).max_context_length == 64
