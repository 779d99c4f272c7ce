"""Generated files are what their sources give, and the checks notice when they are not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from pd_engine.errors import InvalidArgument
from pd_engine.settings import Settings
from pd_ops.protos import CONTRACTS, generate, stale_files
from pd_ops.settings_doc import DOCUMENT, document
from support.checkout import ROOT, tracked_files


@pytest.fixture
def contracts(tmp_path: Path) -> Path:
    """A copy of the contracts alone, that a test may spoil: its root."""
    shutil.copytree(ROOT / CONTRACTS, tmp_path / CONTRACTS)
    return tmp_path


def test_the_generated_files_are_fresh() -> None:
    assert stale_files(ROOT) == []


def test_a_changed_contract_is_noticed(contracts: Path) -> None:
    proto = contracts / CONTRACTS / "api.proto"
    proto.write_text(proto.read_text() + "\nmessage Unexpected { uint32 number = 1; }\n")
    assert {line.split(":")[0] for line in stale_files(contracts)} == {
        "pd_engine/contracts/api_pb2.py", "pd_engine/contracts/api_pb2.pyi"
    }
    generate(contracts, contracts)
    assert stale_files(contracts) == []


def test_missing_and_left_over_files_are_noticed(contracts: Path) -> None:
    folder = contracts / CONTRACTS
    (folder / "api_pb2.py").rename(folder / "other_pb2.py")
    assert stale_files(contracts) == [
        "pd_engine/contracts/api_pb2.py: missing", "pd_engine/contracts/other_pb2.py: has no .proto"
    ]


def test_a_broken_contract_is_refused_with_protocs_words(contracts: Path) -> None:
    (contracts / CONTRACTS / "api.proto").write_text('syntax = "proto3"; message {')
    with pytest.raises(InvalidArgument, match=r"api\.proto:1"):
        generate(contracts, contracts)


def test_the_settings_page_is_fresh() -> None:
    assert (ROOT / DOCUMENT).read_text(encoding="utf-8") == document()


def test_the_settings_page_has_every_key_and_says_what_it_is() -> None:
    text = document()
    for name, field in Settings.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {name: field})
        for key, value in keys.items():
            assert f"| `{key}` |" in text
            assert value.description, f"{name}: {key} has no description"


def test_no_setting_is_decoration() -> None:
    code = [path for path in tracked_files() if path.suffix == ".py" and path.parts[0] != "tests"]
    text = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in code if path.name != "settings.py")
    unread = [
        f"{section}.{key}"
        for section, field in Settings.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
        if not re.search(rf"\.{key}\b", text)
    ]
    assert not unread


def test_the_settings_pages_example_is_a_settings_file() -> None:
    example = document().split("```yaml\n")[1].split("```")[0]
    assert Settings.model_validate(yaml.safe_load(example)).prefill.workers == 2


def test_the_cluster_file_is_one_that_ray_takes() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8")))
    validate_config(config)
    assert config["cluster_name"] == "pd-relay"
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert sum("ray start" in command for command in starts) == 2
