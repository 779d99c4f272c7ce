"""The fingerprint: equal for equal bits, different for everything that could change one, and quick."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import NotFound
from pd_engine.fingerprint import SAMPLE_BYTES, SAMPLE_STRIDE_BYTES, engine_fingerprint, weights_digest
from pd_engine.model.checkpoint import WEIGHTS_FILE
from pd_engine.model.config import ModelConfig, cache_layout
from support.engine_cases import load_engine, write_case


def fingerprint(path: Path, *, with_mtp: bool = True, **overrides: Any) -> str:
    config = ModelConfig.load(path)
    chosen: dict[str, Any] = {"dtype": "bf16", "prefill_form": "absorbed", "numerics": "n"} | overrides
    layout = cache_layout(config, chosen["dtype"], 16, with_mtp)
    return engine_fingerprint(path, config, layout, **chosen)


@pytest.fixture
def copy(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["base"], tmp_path / "copy"))


def test_engines_report_it(checkpoints: dict[str, Path]) -> None:
    engine = load_engine(checkpoints["base"])
    assert engine.fingerprint == fingerprint(checkpoints["base"], dtype="fp32", numerics=engine.ops.numerics)
    assert len(bytes.fromhex(engine.fingerprint)) == 16


def test_what_changes_no_bit_does_not_count(checkpoints: dict[str, Path], copy: Path) -> None:
    """Folder, block size, cache size, chunk size and room for context."""
    want = load_engine(checkpoints["base"]).fingerprint
    assert load_engine(copy).fingerprint == want
    assert load_engine(
        copy, block_size=4, cache_mib=1, chunk_tokens=3, max_context_length=100
    ).fingerprint == want


def test_everything_else_counts(checkpoints: dict[str, Path], copy: Path) -> None:
    path = checkpoints["base"]
    variants = [
        fingerprint(path),
        fingerprint(path, dtype="fp32"),
        fingerprint(path, prefill_form="expanded"),
        fingerprint(path, numerics="m"),
        fingerprint(path, with_mtp=False),
        fingerprint(checkpoints["yarn-v3"]),
    ]
    for field, value in (("routed_scaling_factor", 2.0), ("rms_norm_eps", 1e-5), ("norm_topk_prob", False),
                         ("rope_theta", 10001.0), ("topk_group", 3)):
        config = json.loads((path / "config.json").read_text()) | {field: value}
        (copy / "config.json").write_text(json.dumps(config))
        variants.append(fingerprint(copy))
    assert len(set(variants)) == len(variants)


def test_every_byte_of_the_weights_counts(copy: Path) -> None:
    want = weights_digest(copy)
    data = bytearray((copy / WEIGHTS_FILE).read_bytes())
    for place in (0, 9, len(data) // 2, len(data) - 1):
        data[place] ^= 1
        (copy / WEIGHTS_FILE).write_bytes(data)
        assert weights_digest(copy) != want
        data[place] ^= 1
    (copy / WEIGHTS_FILE).write_bytes(data + b"\0")
    assert weights_digest(copy) != want
    (copy / WEIGHTS_FILE).write_bytes(data)
    assert weights_digest(copy) == want


def test_shards_are_read_in_order_of_name(tmp_path: Path) -> None:
    path = write_case(tmp_path, "base", max_shard_bytes=64_000)
    want = weights_digest(path)
    last = sorted(path.glob("*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert weights_digest(path) != want


def test_huge_files_are_sampled(copy: Path) -> None:
    """A sparse file of 2 GiB: quick, and it sees a change in the header, in a sample and at the end, and any size."""
    file = copy / WEIGHTS_FILE
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as stream:
        stream.truncate(2 << 30)
    seen = {weights_digest(copy)}
    changes = [header_bytes - 1, header_bytes, header_bytes + 5 * SAMPLE_STRIDE_BYTES + SAMPLE_BYTES - 1, (2 << 30) - 1]
    for number, place in enumerate(changes, start=1):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\x5a")
        seen.add(weights_digest(copy))
        assert len(seen) == number + 1, place
    with file.open("r+b") as stream:
        stream.truncate((2 << 30) + 1)
    seen.add(weights_digest(copy))
    assert len(seen) == len(changes) + 2
    with file.open("r+b") as stream:  # between samples: the documented blind spot
        stream.seek(header_bytes + SAMPLE_BYTES)
        stream.write(b"\x5a")
    assert weights_digest(copy) in seen


def test_no_weights(copy: Path) -> None:
    (copy / WEIGHTS_FILE).unlink()
    with pytest.raises(NotFound, match="no weights"):
        weights_digest(copy)
