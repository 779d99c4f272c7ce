"""The script for a GPU on a machine that nobody has seen: its cores, its compiler, where it may write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import triton_shim  # noqa: F401  (before any module with kernels)
from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "kernels" / "benchmarks"))

from gpu_bench import main as gpu_main  # isort: skip
from gpu_bench.cores import num_cores  # isort: skip

SCRIPT = ROOT / "kernels" / "benchmarks" / "gpu.sh"
CPU = torch.device("cpu")


def test_cores_are_those_that_may_be_used(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    allowed = num_cores(quota)
    assert allowed == len(os.sched_getaffinity(0))
    for text, expected in (("max 100000", allowed), ("100000 100000", 1), ("50000 100000", 1), ("", allowed)):
        quota.write_text(f"{text}\n", encoding="utf-8")
        assert num_cores(quota) == expected


def test_a_gpu_that_nothing_can_be_launched_on_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @property
        def active(self) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(gpu_main.triton.runtime, "driver", Driver())
    gpu_main.check_launcher(CPU)
    with pytest.raises(gpu_main.NoGpu, match=r"Failed to find C compiler\nIt needs a C compiler .*, Python\.h"):
        gpu_main.check_launcher(torch.device("cuda"))


@pytest.mark.parametrize(("names", "ours"), [
    ({"HOME": "/proc"}, False), ({"HOME": "{}"}, True), ({"HOME": "/proc", "TRITON_CACHE_DIR": "{}/cache"}, True),
])
def test_a_home_that_cannot_be_written_to_is_no_cache(tmp_path: Path, names: dict[str, str], ours: bool) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "${TRITON_CACHE_DIR:-$HOME/.triton/cache}"\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {name: value.format(tmp_path) for name, value in names.items()}
    done = subprocess.run([SCRIPT], env=environment | {"PYTHON": str(python), "TMPDIR": str(tmp_path)},
                          capture_output=True, text=True, check=True)
    cache = Path(done.stdout.strip())
    assert cache.is_dir()
    assert cache.is_relative_to(tmp_path)
    assert ("cannot be written to" in done.stderr) != ours
