"""The wheel without extras, in an environment of its own: what a user gets who types `pip install pd-relay`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pd_kernels.build import find_compiler
from support.checkout import ROOT, copy_tracked

TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new virtual environment with torch and the project in it."""
    folder = tmp_path_factory.mktemp("base")
    copy_tracked(folder / "source")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [folder / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    subprocess.run([*pip, *shlex.split(os.environ.get("TORCH_PIP_ARGS", "")), TORCH], check=True)
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", folder / "source"], check=True)
    return folder / "venv" / "bin"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_base_install_is_small_and_generates(environment: Path) -> None:
    listing = subprocess.run(
        [environment / "python", "-m", "pip", "--disable-pip-version-check", "list", "--format=json"],
        check=True, capture_output=True, text=True,
    )
    versions = {entry["name"].lower(): entry["version"] for entry in json.loads(listing.stdout)}
    assert "pd-relay" in versions
    if versions["torch"].endswith("+cpu"):  # the build for CUDA brings its own
        assert not [name for name in versions if name.startswith(("triton", "nvidia", "cuda"))]
    assert not {"transformers", "pytest", "nccl4py", "nixl-cu13"} & versions.keys()

    names = "from pd_kernels.backend import load_ops; print(load_ops('auto', threads=1).name)"
    ops = subprocess.run([environment / "python", "-c", names], cwd="/", check=True, capture_output=True, text=True)
    assert ops.stdout.startswith("cpu") is (find_compiler() is not None)

    arguments = ["generate", "--model", "demo", "--prompt", "The module", "--max-tokens", "8", "--temperature", "0"]
    answers = [
        subprocess.run([command, *arguments, "--json"], cwd="/", check=True, capture_output=True, text=True).stdout
        for command in (environment / "pd-relay", Path(sys.executable).with_name("pd-relay"))
    ]
    installed, checkout = (json.loads(answer) for answer in answers)
    assert len(installed["token_ids"]) == 8
    assert installed["token_ids"] == checkout["token_ids"]
