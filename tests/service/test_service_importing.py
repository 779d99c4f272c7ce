"""Imports of a worker: the collector rests, and looks at nothing of them later; the library of torch comes early."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from pd_engine.service.importing import begin_loading_torch
from support.checkout import ROOT

CODE = """
import gc, json
from pd_engine.service.importing import quick_imports
runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
with quick_imports():
    during = gc.isenabled()
    import decode_worker.worker
print(json.dumps([during, gc.isenabled(), len(runs), gc.get_freeze_count(), len(gc.get_objects())]))
"""


def test_the_collector_rests_while_a_worker_is_imported_and_spares_it_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=ROOT)
    is_on_during, is_on_after, num_runs, num_frozen, num_tracked = json.loads(done.stdout)
    assert not is_on_during
    assert is_on_after
    assert num_runs == 0
    assert num_frozen > 100_000
    assert num_tracked < 1_000


EARLY = """
import sys
from pd_engine.service.importing import LIBRARY, WITHOUT_TORCH, begin_loading_torch
thread = begin_loading_torch()
for name in WITHOUT_TORCH:
    __import__(name)
assert "torch" not in sys.modules
thread.join()
mapped = lambda: {line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith(LIBRARY)}
before = mapped()
import torch
assert torch.ones(3).sum() == 3
print(len(before), before == mapped())
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch chooses its libraries itself")
def test_torchs_own_library_is_loaded_before_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["1", "True"], done.stderr


@pytest.mark.parametrize("files", [[], ["libtorch_cpu.so", "libtorch_cuda.so"]])
def test_a_torch_of_other_devices_or_without_the_library_loads_itself(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    for name in files:
        (tmp_path / "lib" / name).touch()
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert begin_loading_torch() is None


def test_without_torch_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert begin_loading_torch() is None


def test_a_library_that_cannot_be_loaded_leaves_it_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").write_bytes(b"no library")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    thread = begin_loading_torch()
    assert thread is not None
    thread.join()
