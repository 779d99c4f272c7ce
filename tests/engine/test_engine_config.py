"""config.json: what is read, and that everything else is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument, NotFound, PdRelayError
from pd_engine.model.checkpoint import DEMO_PATH, resolve_model
from pd_engine.model.config import ModelConfig, cache_layout
from pd_engine.text.json_file import read_json_object
from support.engine_v3_config import DEEPSEEK_V3

YARN = DEEPSEEK_V3["rope_scaling"]


def test_deepseek_v3_is_read_as_published() -> None:
    config = ModelConfig.parse(DEEPSEEK_V3)
    assert (config.num_hidden_layers, config.n_routed_experts, config.q_lora_rank) == (61, 256, 1536)
    assert config.weight_format == "fp8"
    assert config.has_mtp
    assert [config.is_moe(layer) for layer in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 40


def test_layout_has_a_component_a_layer_and_mtp_last() -> None:
    layout = cache_layout(ModelConfig.parse(DEEPSEEK_V3), "bf16", 64, with_mtp=True)
    assert [component.name for component in layout.components] == [f"layers.{i}" for i in range(61)] + ["mtp.0"]
    assert [component.first_position for component in layout.components] == [0] * 61 + [1]
    assert layout.bytes_per_token == 71_424  # deepseek_v3.md §3.1
    assert cache_layout(ModelConfig.parse(DEEPSEEK_V3), "bf16", 64, with_mtp=False).bytes_per_token == 70_272


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 10000.0}, "rope_scaling": None},
        {"rope_scaling": {name: value for name, value in YARN.items() if name != "type"} | {"rope_type": "yarn"}},
        {"rope_scaling": YARN | {"attention_factor": None}},
        {"dtype": "bfloat16", "torch_dtype": None},
        {"num_mtp_layers": 1, "num_nextn_predict_layers": None},
    ],
)
def test_spellings_of_the_same_config(spelling: dict[str, Any]) -> None:
    assert ModelConfig.parse(DEEPSEEK_V3 | spelling) == ModelConfig.parse(DEEPSEEK_V3)


@pytest.mark.parametrize("names", [None, ["DeepseekV3ForCausalLM"], ["Other", "DeepseekV3ForCausalLM"]])
def test_architectures_may_be_absent(names: list[str] | None) -> None:
    absent = {name: value for name, value in DEEPSEEK_V3.items() if name != "architectures"}
    assert ModelConfig.parse(absent | {"architectures": names}) == ModelConfig.parse(absent)


def test_default_rope_parameters_mean_no_scaling() -> None:
    plain = {"rope_scaling": None, "rope_theta": 500.0}
    nested = plain | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    assert ModelConfig.parse(DEEPSEEK_V3 | nested) == ModelConfig.parse(DEEPSEEK_V3 | plain)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v2"}, "model_type"),
    ({"model_type": None}, "model_type"),
    ({"architectures": ["DeepseekV2ForCausalLM"]}, "architectures must name DeepseekV3ForCausalLM or be absent"),
    ({"architectures": ["LlamaForCausalLM", "DeepseekV3Model"]}, "architectures"),
    ({"architectures": []}, "architectures"),
    ({"architectures": "DeepseekV3ForCausalLM"}, "architectures"),
    ({"architectures": [["DeepseekV3ForCausalLM"]]}, "architectures"),
    ({"architectures": {"DeepseekV3ForCausalLM": 1}}, "architectures"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": -7168}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": 10**30}, "hidden_size"),
    ({"hidden_size": "7168"}, "hidden_size"),
    ({"hidden_size": 7168.5}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": [7168]}, "hidden_size"),
    ({"vocab_size": 1}, "vocab_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    ({"kv_lora_rank": {}}, "kv_lora_rank"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"rope_scaling": "yarn"}, "rope_scaling"),
    ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling.type"),
    ({"rope_scaling": YARN | {"rope_type": "default"}}, "rope_scaling.type"),
    ({"rope_scaling": {"factor": 40}}, "rope_scaling.type"),
    ({"rope_scaling": YARN | {"factor": float("nan")}}, "rope_scaling.factor"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor"),
    ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast"),
    ({"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0}}, "mscale"),
    ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate"),
    ({"rope_parameters": YARN | {"rope_type": "yarn"}}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": None}, "rope_theta"),
    ({"torch_dtype": "float16"}, "dtype"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method"),
    ({"quantization_config": 7}, "quant_method"),
    ({"n_routed_experts": 0}, "n_routed_experts"),
    ({"n_group": 7}, "n_group"),
    ({"n_group": 256, "topk_group": 8}, "n_group"),
    ({"topk_group": 9}, "topk_group"),
    ({"num_experts_per_tok": 200}, "num_experts_per_tok"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": True}, "attention_bias"),
    ({"rope_interleave": False}, "rope_interleave"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=[f"{field}-{i}" for i, (_, field) in enumerate(REFUSED)])
def test_unsupported_values_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ModelConfig.parse(DEEPSEEK_V3 | change)
    assert field in caught.value.message
    assert len(caught.value.message) < 1000
    [value] = list(change.values())[:1]
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        assert str(value)[:20] in caught.value.message  # what was given


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"7", b"{", b'{"model_type": "\xff"}', b"\xef\xbb\xbf{}", b"[" * 100_000, b"{}", b"null",
     b'{"hidden_size": 1' + b"0" * 5000 + b"}"],
)
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        ModelConfig.load(tmp_path)
    assert len(caught.value.message) < 1000


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidArgument, match="larger than"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_devices_and_pipes_are_not_read(tmp_path: Path, name: str) -> None:
    """They would never end."""
    read = ModelConfig.load if name == "config.json" else (lambda path: read_json_object(path / name))
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(InvalidArgument, match="is no regular file"):
        read(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidArgument, match="is no regular file"):
        read(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "[]", "\"", "7"])
def test_broken_json_beside_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InvalidArgument, match="JSON"):
        read_json_object(tmp_path / "tokenizer_config.json")


def test_missing_checkpoints(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "none"), "no-such-model"):
        with pytest.raises(NotFound):
            resolve_model(name)
    with pytest.raises(NotFound):
        ModelConfig.load(tmp_path)
    with pytest.raises(NotFound):
        ModelConfig.load(tmp_path / "none")


@pytest.mark.parametrize("field", DEEPSEEK_V3)
def test_any_json_gives_a_config_or_a_typed_error(field: str) -> None:
    """Each field in turn takes every kind of value that JSON has."""
    numbers = [0, -1, 1, 2**70, 1e308, float("nan"), float("-inf")]
    for value in [None, True, False, *numbers, "", "x" * 10_000, [], [1], {}, {"a": 1}]:
        message = ""
        try:
            ModelConfig.parse(json.loads(json.dumps(DEEPSEEK_V3 | {field: value})))
        except PdRelayError as error:
            message = error.message
        assert len(message) < 1000


def test_demo_is_found_wherever_the_package_is() -> None:
    assert resolve_model("demo") == DEMO_PATH.resolve()
    assert ModelConfig.load(DEMO_PATH).cache_width == 576


def test_config_and_checkpoint_import_no_torch() -> None:
    modules = ["pd_engine.model.config", "pd_engine.model.checkpoint", "pd_engine.model.tensors", "pd_engine.explain",
               "pd_engine.fingerprint", "pd_engine.cache.layout", "pd_engine.cache.blocks"]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
