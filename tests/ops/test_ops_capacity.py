"""`pd-relay capacity`: published figures, digit for digit in what it prints; its self-check; wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument, NotFound
from pd_engine.explain import explain_model
from pd_engine.model.checkpoint import DEMO_PATH, stored_tensors
from pd_engine.model.config import ModelConfig
from pd_ops.capacity.audit import Demand, audit, smallest_tp
from pd_ops.capacity.cache import Component, Rows, total_bytes
from pd_ops.capacity.checks import checks
from pd_ops.capacity.deepseek_v3 import DEEPSEEK_V3
from pd_ops.capacity.deepseek_v4_config import FLASH, PRO, parse_v4
from pd_ops.capacity.named import NAMES, architecture
from pd_ops.capacity.traffic import Link, distinct_experts, ring_all_reduce_bytes, ring_all_reduce_s
from support.commands import run_command

GIB = 2**30
PRO_AT_8 = ("--model", "deepseek-v4-pro", "--context", "32768", "--batch", "32", "--tp", "8")
DEMAND = Demand(context=32_768, batch=8, gpu_bytes=80 * GIB, mean_context=16_384)


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the command prints, by its arguments: as people see it."""
    commands = {
        "pro, batch 32": PRO_AT_8,
        "pro, batch 8": ("--model", "deepseek-v4-pro", "--batch", "8"),
        "flash": ("--model", "deepseek-v4-flash", "--batch", "8"),
        "v3": ("--model", "deepseek-v3",),
    }
    finished = {name: run_command("capacity", *arguments) for name, arguments in commands.items()}
    assert {name: one.code for name, one in finished.items()} == dict.fromkeys(commands, 0)
    return {name: one.stdout for name, one in finished.items()}


# (run, line, digits) of every capacity figure that is published about these models.
PUBLISHED = [
    ("pro, batch 8", "a request and rank at 32,768 tokens", "333.218750 MiB"),
    ("pro, batch 8", "a request and rank at 32,768 tokens", "333.218750 MiB  MiB: main 255.375, indexer 60, state 17"),
    ("pro, batch 8", "a request and rank at 1,048,576 tokens", "9873.468750 MiB  MiB: main 7935.625, indexer 1920,"),
    ("pro, batch 8", "a request and rank at 131,072 tokens", "1256.468750 MiB"),
    ("pro, batch 8", "a request and rank at 1,048,576 tokens", "9873.468750 MiB"),
    ("pro, batch 8", "routed experts, FP4 with scales", "765.597656 GiB"),
    ("pro, batch 8", "routed experts of a card at TP 8", "95.6997 GiB"),
    ("pro, batch 8", "routed experts of a card at TP 16", "47.8499 GiB"),
    ("pro, batch 8", "smallest legal TP on 80 GiB cards", "16"),
    ("pro, batch 8", "8 requests at 32,768 tokens", "2.60327 GiB"),
    ("pro, batch 8", "8 requests at 1,048,576 tokens", "77.13647 GiB"),
    ("pro, batch 8", "shared experts", "3.75316 GiB"),
    ("pro, batch 32", "ring all-reduce, sent by a rank", "1568 KiB"),
    ("pro, batch 32", "expected distinct experts", "152.01 of 384"),
    ("pro, batch 32", "dispatch payload", "2688 KiB"),
    ("pro, batch 32", "scores of all queries, a rank's heads", "4 GiB"),
    ("pro, batch 32", "scores added up over heads", "512 MiB"),
    ("pro, batch 32", "without MTP", "315.960938 MiB"),
    ("pro, batch 32", "all weights", "805.31909 GiB"),
    ("flash", "a request and rank at 32,768 tokens", "232.015625 MiB"),
    ("flash", "a request and rank at 131,072 tokens", "877.015625 MiB"),
    ("flash", "a request and rank at 1,048,576 tokens", "6897.015625 MiB"),
    ("v3", "a token, all layers", "70,272 B"),
    ("v3", "a token, with the MTP layer", "71,424 B"),
    ("v3", "latent cache, token and layer", "1,152 B"),
    ("v3", "keys and values of all heads instead", "81,920 B"),
    ("v3", "latent cache as a share of that", "1.406 %"),
    ("v3", "attention scale", "0.13523378"),
    ("v3", "YaRN mscale squared", "1.8738"),
    ("v3", "all weights", "641.28529 GiB"),
    ("v3", "experts", "256 + 1 experts, top-8"),
    ("v3", "routing weights are multiplied by", "2.5"),
    ("v3", "vocabulary", "129,280"),
    ("v3", "hidden size", "7,168"),
]


@pytest.mark.parametrize(("run", "line", "digits"), PUBLISHED)
def test_published_figures_can_be_read_off(printed: dict[str, str], run: str, line: str, digits: str) -> None:
    found = [text for text in printed[run].splitlines() if text.startswith(f"  {line}  ")]
    assert any(f"  {digits}" in text for text in found), found


def test_files_are_counted_as_they_were_published() -> None:
    counts = {name: architecture(name).weights for name in NAMES}
    assert {name: ledger.num_tensors for name, ledger in counts.items()} == {
        "deepseek-v3": 91_991, "deepseek-v4-pro": 145_116, "deepseek-v4-flash": 69_187,
    }
    assert counts["deepseek-v3"].num_stored_elements == 684_531_386_000
    assert counts["deepseek-v4-flash"].num_bytes == 159_609_485_896
    assert counts["deepseek-v4-pro"].part("routed experts").num_elements == 1_547_396_186_112


@pytest.mark.parametrize(("num_tokens", "mib"), [
    (1, 0.474), (127, 25.544), (128, 9.413), (129, 9.827), (32_768, 315.961), (131_071, 1255.402), (131_072, 1239.211),
])
def test_v4_handoff(num_tokens: int, mib: float) -> None:
    assert round(total_bytes(architecture("deepseek-v4-pro").handoff, num_tokens) / 2**20, 3) == mib


def test_v4_packed_cache_and_state() -> None:
    model = architecture("deepseek-v4-pro")
    parts = {part: round(total_bytes(model.packed_cache, 32_768, part) / 2**20, 2) for part in model.cache_parts}
    assert parts == {"main": 145.64, "indexer": 30.94, "state": 17.84}


def test_demo_is_what_its_files_hold() -> None:
    model = architecture("demo")
    config = ModelConfig.load(DEMO_PATH)
    explained = explain_model(
        config, num_tokens=16, dtype="bf16", prefill_form="absorbed", latent_dtype="auto",
    )
    assert total_bytes(model.cache + model.mtp_cache, 1) == explained.cache_bytes_per_token == 5760
    assert model.weights.num_tensors == len(stored_tensors(DEMO_PATH))


def test_legal_sizes() -> None:
    assert {name: architecture(name).legal_tps() for name in NAMES} == {
        "deepseek-v3": (1, 2, 4, 8, 16), "deepseek-v4-pro": (1, 2, 4, 8, 16), "deepseek-v4-flash": (1, 2, 4, 8),
    }
    finished = run_command("capacity", "--model", "deepseek-v4-pro", "--tp", "3", "--json")
    assert finished.code == 2
    assert "output groups (16)" in finished.document["error"]["message"]
    assert "legal are 1, 2, 4, 8, 16" in finished.document["error"]["message"]


def test_smallest_size_hangs_on_the_card_and_the_cache() -> None:
    model = architecture("deepseek-v4-pro")
    assert smallest_tp(model, DEMAND) == 16
    assert smallest_tp(model, replace(DEMAND, gpu_bytes=141 * GIB)) == 8
    assert smallest_tp(model, replace(DEMAND, context=1_048_576)) is None  # 77 GiB of cache beside 57 of weights
    tight = audit(model, DEMAND, 16)
    exactly = replace(DEMAND, margin=0.0, gpu_bytes=tight.reserved_bytes - tight.margin_bytes)
    assert audit(model, exactly, 16).free_bytes == 0
    assert smallest_tp(model, exactly) == 16
    assert smallest_tp(model, replace(exactly, gpu_bytes=exactly.gpu_bytes - 1)) is None


def test_paged_cache_takes_whole_blocks_of_what_is_used() -> None:
    model = architecture("deepseek-v3")
    card = audit(model, replace(DEMAND, mean_context=65, block_size=64), 16)
    assert card.paged_cache_bytes == 8 * 128 * 71_424
    assert card.cache_bytes == 8 * 32_768 * 71_424
    assert card.paged_free_bytes - card.free_bytes == card.cache_bytes - card.paged_cache_bytes


@pytest.mark.parametrize(("rows", "counts"), [
    (Rows.FIXED, [128, 128, 128, 128]), (Rows.WINDOW, [0, 127, 128, 128]), (Rows.ENTRIES, [0, 0, 1, 2]),
    (Rows.REMAINDER, [0, 127, 0, 1]), (Rows.OVERLAP, [0, 0, 1, 1]),
])
def test_rows_of_components(rows: Rows, counts: list[int]) -> None:
    component = Component(name="x", part="main", num_layers=3, row_bytes=10, rows=rows, size=128)
    assert [component.num_rows(tokens) for tokens in (0, 127, 128, 257)] == counts
    assert component.num_bytes(257) == 30 * counts[-1]


def test_traffic_at_its_edges() -> None:
    model = architecture("deepseek-v4-pro")
    link = Link(name="x", gb_per_s=1.0, latency_us=10.0)
    assert ring_all_reduce_bytes(1000, 1) == 0
    assert ring_all_reduce_s(1000, 1, link) == 0
    assert ring_all_reduce_s(1_000_000, 2, link) == pytest.approx(2 * 10e-6 + 1e-3)
    assert distinct_experts(model, 1) == pytest.approx(6)
    assert distinct_experts(model, 1_000_000) == pytest.approx(384)


@pytest.mark.parametrize("name", NAMES)
def test_self_check_passes_and_can_fail(name: str) -> None:
    model = architecture(name)
    assert [check.name for check in checks(model, DEMAND, 8) if not check.passed] == []
    fewer = replace(model.cache[0], num_layers=model.cache[0].num_layers - 1)
    broken = replace(model, cache=(fewer, *model.cache[1:]))
    failed = {check.name for check in checks(broken, DEMAND, 8) if not check.passed}
    assert "cache of 32768 tokens, in closed form" in failed
    assert model.published is not None
    wrong = replace(model, published=replace(model.published, num_tensors=1))
    assert [check.name for check in checks(wrong, DEMAND, 8) if not check.passed] == [
        "tensors, as the published files have"
    ]


def test_what_does_not_divide_evenly_is_no_fault() -> None:
    """A hidden state of an odd number of bytes a rank, weights that are rounded up."""
    model = replace(architecture("deepseek-v4-flash"), hidden_size=4097)
    odd = replace(model.weights.weights[0], shape=(129_281,), count=1)
    model = replace(model, weights=replace(model.weights, weights=(odd, *model.weights.weights[1:])), published=None)
    assert [check.name for check in checks(model, replace(DEMAND, batch=1), 8) if not check.passed] == []
    thirds = replace(model, num_experts=48, num_experts_per_token=4)  # 48 (1 - (1 - 4 / 48)) is above 4 by rounding
    assert [check.name for check in checks(thirds, replace(DEMAND, batch=1), 8) if not check.passed] == []


def test_json_has_raw_numbers() -> None:
    document = run_command("capacity", *PRO_AT_8, "--json").document
    assert (document["tp"], document["smallest_tp"], document["fits"]) == (8, 16, False)
    figures = {one["name"]: one for one in document["cache"]}
    assert figures["a request and rank at 32,768 tokens"]["value"] == 333.21875 * 2**20
    assert all(check["passed"] for check in document["checks"])


def test_a_checkpoint_of_either_family_in_a_folder(tmp_path: Path) -> None:
    _write(tmp_path, DEEPSEEK_V3)
    assert architecture(str(tmp_path)).weights == architecture("deepseek-v3").weights
    _write(tmp_path, FLASH)
    assert architecture(str(tmp_path)).weights == architecture("deepseek-v4-flash").weights


@pytest.mark.parametrize(("change", "said"), [
    ({"compress_ratios": [4, 128]}, "must have 62 entries, got 2"),
    ({"compress_ratios": [5] * 62}, "compress_ratios"),
    ({"hidden_size": -1}, "hidden_size"),
    ({"hidden_size": "7168"}, "hidden_size"),
    ({"o_groups": 7}, "o_groups must divide"),
])
def test_broken_v4_configs_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_v4({**PRO, **change})


def test_models_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="deepseek-v4-pro"):
        architecture("deepseek-v5")
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InvalidArgument, match="not JSON"):
        architecture(str(tmp_path))
    finished = run_command("capacity", "--model", "deepseek-v3", "--context", "163841")
    assert finished.code == 2
    assert "at most the model's 163840" in finished.stderr


def _write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
