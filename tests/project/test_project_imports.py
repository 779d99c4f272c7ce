"""Who may import whom, as declared (import-linter) and as it happens in a process of each role."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkout import ROOT

IMPORT_ALL = """
import importlib, json, pkgutil, sys
names = []
for package in {packages!r}:
    module = importlib.import_module(package)
    names += [package, *(m.name for m in pkgutil.walk_packages(module.__path__, package + "."))]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(json.dumps({{"imported": names, "loaded": sorted({{name.partition(".")[0] for name in sys.modules}})}}))
"""

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def import_all(*packages: str) -> tuple[set[str], set[str]]:
    """Imports every module of these packages in a fresh process: (their names, top-level names it then holds)."""
    code = IMPORT_ALL.format(packages=packages)
    result = subprocess.run([sys.executable, "-c", code], cwd="/", check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.splitlines()[-1])
    return set(report["imported"]), set(report["loaded"])


def test_layers_hold() -> None:
    result = subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "imported", "contract"),
    [
        ("pd_engine/intruder.py", "kv_transfer.journey", "layers"),
        ("prefill_worker/intruder.py", "decode_worker", "layers"),
        ("pd_router/intruder.py", "pd_engine.cache.arena", "router never imports torch"),
        ("kv_transfer/intruder.py", "ray", "Ray carries lifecycle only"),
        ("pd_engine/intruder.py", "transformers", "transformers is an oracle"),
    ],
)
def test_a_broken_layer_is_caught(tmp_path: Path, module: str, imported: str, contract: str) -> None:
    for name in ("pd_engine", "pd_router", "prefill_worker", "decode_worker", "kv_transfer"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "pd_kernels").symlink_to(ROOT / "kernels" / "pd_kernels")
    (tmp_path / "pd_ops").symlink_to(ROOT / "ops" / "pd_ops")
    package = Path(module).parts[0]
    (tmp_path / package).unlink()
    (tmp_path / package).mkdir()
    for path in (ROOT / package).iterdir():
        (tmp_path / package / path.name).symlink_to(path)
    (tmp_path / module).write_text(f"import {imported}\n")
    result = subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache", ROOT / "pyproject.toml"],
        cwd=tmp_path, check=False, capture_output=True, text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    broken = [line for line in result.stdout.splitlines() if line.endswith("BROKEN")]
    assert [line for line in broken if contract in line], broken


def test_the_routers_process_holds_neither_torch_nor_ray() -> None:
    imported, loaded = import_all("pd_router", "pd_engine.text", "pd_engine.service", "pd_engine.contracts")
    assert "pd_router.server" in imported
    assert not loaded & {"torch", "ray", "transformers", "pd_kernels", "kv_transfer"}


@pytest.mark.parametrize("role", ["prefill_worker", "decode_worker"])
def test_a_workers_process_holds_neither_transformers_nor_ray_nor_triton(role: str) -> None:
    imported, loaded = import_all(role, "kv_transfer")
    assert f"{role}.worker" in imported
    assert "torch" in loaded
    assert not loaded & {"transformers", "ray", "triton", "pd_router"}
    assert not loaded & ({"prefill_worker", "decode_worker"} - {role})
