"""What is installed, under which names, and what it pulls in."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.checkout import GENERATED_SUFFIXES, PACKAGES, ROOT, copy_tracked, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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


@pytest.mark.slow
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


def imported_distributions() -> dict[str, str]:
    """Distribution of each import in the packages: name -> one file that has it. Own packages and the standard library
    are left out."""
    known = importlib.metadata.packages_distributions()
    found: dict[str, str] = {}
    for path in tracked_files():
        if path.suffix != ".py" or path.parts[0] == "tests" or not set(path.parts[:2]) & set(PACKAGES):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - set(PACKAGES) - sys.stdlib_module_names:
                found[canonicalize_name(known.get(top, [top])[0])] = str(path)
    return found


def test_every_import_is_a_declared_dependency() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["gpu"], *extras["nixl"]]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    assert declared >= {"torch", "triton", "ray"}
    developing = {"grpcio-tools", "annotated-types"}  # pd_ops.protos and .settings_doc, which only a checkout needs
    assert not {name: path for name, path in imported_distributions().items() if name not in declared | developing}


def test_extras_name_what_needs_a_gpu() -> None:
    extras = PROJECT["optional-dependencies"]
    names = {extra: {Requirement(line).name for line in lines} for extra, lines in extras.items()}
    assert names["gpu"] >= {"triton", "nccl4py"}
    assert names["nixl"] == {"nixl-cu13"}  # the package `nixl` would bring its builds for two CUDA versions
    assert names["dev"] >= {"transformers", "triton"}


def test_constraints_pin_every_requirement_and_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    requirements = [Requirement(pin) for pin in pins]
    assert all(str(requirement.specifier).startswith("==") and not requirement.url for requirement in requirements)
    assert not any("+" in pin for pin in pins), "a local version exists on one machine only"
    pinned = {canonicalize_name(requirement.name) for requirement in requirements}
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    direct = {canonicalize_name(Requirement(line).name) for line in lines}
    assert not direct - pinned - {"cuda-bindings"}  # whose version the installed CUDA decides


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Files of the wheel that the committed tree builds on a machine without a compiler: name -> bytes."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_tracked(folder / "source")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "source", env={**os.environ, "CXX": "no-such-compiler"},
        check=False, capture_output=True, text=True,
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
    in_packages = [path for path in sources if set(path.parts[:2]) & set(PACKAGES) and path.parts[0] != "tests"]
    assert any(path.name.endswith(GENERATED_SUFFIXES) for path in in_packages)
    expected = {str(path).removeprefix("kernels/").removeprefix("ops/") for path in in_packages}
    assert not expected - wheel_files.keys()


def test_the_wheel_ships_the_demo_checkpoint_whole(wheel_files: dict[str, int]) -> None:
    demo = ROOT / "pd_engine" / "model" / "demo"
    for path in demo.iterdir():
        assert wheel_files[str(path.relative_to(ROOT))] == path.stat().st_size
    assert wheel_files["pd_engine/model/demo/model.safetensors"] > 20_000_000
    assert sum(path.stat().st_size for path in demo.iterdir()) <= 32 * 2**20
