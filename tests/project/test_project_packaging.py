"""What is installed, under which names, and what it pulls in."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.checkout import GENERATED_SUFFIXES, PACKAGES, ROOT, copy_tracked, tracked_files

GPU_ONLY = ("nvidia", "cuda", "triton", "nccl", "nixl", "cupy")


@pytest.mark.parametrize("folder", ["kernels", "ops", "tests"])
def test_no_package_takes_a_name_that_others_use(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/ must not become an importable package"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_imports_from_this_checkout_and_is_typed(package: str) -> None:
    code = f"import {package}; print({package}.__file__)"
    result = subprocess.run([sys.executable, "-c", code], cwd="/", check=True, capture_output=True, text=True)
    location = Path(result.stdout.strip()).parent
    assert location.is_relative_to(ROOT)
    assert (location / "py.typed").is_file()


@pytest.mark.parametrize("name", ["kernels", "ops", "tests", "support"])
def test_generic_names_do_not_import_from_here(name: str) -> None:
    code = f"import importlib.util as u; spec = u.find_spec({name!r}); print(spec.origin if spec else None)"
    result = subprocess.run([sys.executable, "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert str(ROOT) not in result.stdout


def test_transformers_still_loads_models_beside_this_project() -> None:
    code = "from transformers import DeepseekV3ForCausalLM; print(DeepseekV3ForCausalLM.__name__)"
    result = subprocess.run([sys.executable, "-c", code], cwd="/", check=False, capture_output=True, text=True)
    assert result.stdout.strip() == "DeepseekV3ForCausalLM", result.stderr[-2000:]


def requirement_closure(name: str) -> dict[str, str]:
    """Everything that installing `name` without extras installs here: name -> what asked for it.

    A torch that was built for CUDA names CUDA's libraries itself, so the walk stops at such a torch.
    """
    found: dict[str, str] = {}
    queue = [(name, "", frozenset[str]())]
    while queue:
        name, _, extras = queue.pop()
        distribution = importlib.metadata.distribution(name)
        if name == "torch" and not distribution.version.endswith("+cpu"):
            continue
        for line in distribution.requires or []:
            requirement = Requirement(line)
            child = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            )
            if wanted and child not in found:
                found[child] = name
                queue.append((child, name, frozenset(requirement.extras)))
    return found


def test_the_base_install_pulls_neither_cuda_nor_triton_nor_transformers() -> None:
    closure = requirement_closure("pd-relay")
    assert {"torch", "ray", "grpcio", "tokenizers"} <= closure.keys()
    unwanted = {name: parent for name, parent in closure.items() if name.startswith(GPU_ONLY) or name == "transformers"}
    assert not unwanted


def test_extras_name_what_needs_a_gpu() -> None:
    metadata = importlib.metadata.metadata("pd-relay")
    assert set(metadata.get_all("Provides-Extra") or []) >= {"gpu", "nixl", "dev"}
    gated = [Requirement(line) for line in importlib.metadata.requires("pd-relay") or [] if "extra ==" in line]
    by_name = {requirement.name: str(requirement.marker) for requirement in gated}
    assert "gpu" in by_name["nccl4py"]
    assert "nixl" in by_name["nixl-cu13"]
    assert "dev" in by_name["transformers"]


def test_constraints_pin_every_requirement_and_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    requirements = [Requirement(pin) for pin in pins]
    assert all(str(requirement.specifier).startswith("==") and not requirement.url for requirement in requirements)
    assert not any("+" in pin for pin in pins), "a local version exists on one machine only"
    pinned = {canonicalize_name(requirement.name) for requirement in requirements}
    direct = {canonicalize_name(Requirement(line).name) for line in importlib.metadata.requires("pd-relay") or []}
    assert direct - pinned == {"cuda-bindings"} - pinned


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Files of the wheel that the committed tree builds: name -> bytes."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_tracked(folder / "source")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "source", check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    (wheel,) = folder.glob("pd_relay-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel_files: dict[str, int]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert all(f"{package}/py.typed" in wheel_files for package in PACKAGES)


def test_the_wheel_holds_every_file_that_the_code_reads(wheel_files: dict[str, int]) -> None:
    suffixes = {".py", ".pyi", ".proto", ".cpp", ".h", ".json", ".safetensors", ".jinja"}
    sources = [path for path in tracked_files() if path.suffix in suffixes]
    in_packages = [path for path in sources if any(part in PACKAGES for part in path.parts)]
    assert any(path.name.endswith(GENERATED_SUFFIXES) for path in in_packages)
    expected = {str(path).removeprefix("kernels/").removeprefix("ops/") for path in in_packages}
    assert not expected - wheel_files.keys()


def test_the_wheel_ships_the_demo_checkpoint_whole(wheel_files: dict[str, int]) -> None:
    demo = ROOT / "pd_engine" / "model" / "demo"
    for path in demo.iterdir():
        assert wheel_files[str(path.relative_to(ROOT))] == path.stat().st_size
    assert wheel_files["pd_engine/model/demo/model.safetensors"] > 20_000_000
    assert sum(path.stat().st_size for path in demo.iterdir()) <= 32 * 2**20
