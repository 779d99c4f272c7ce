"""Kernels broken on purpose are caught: each defect is put into the sources, compiled, and must fail a check."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_kernels import build as pd_build
from pd_kernels.cpu.native import LIBRARY_DIRECTORY_VARIABLE
from pd_kernels.cpu.ops import CpuOps
from pd_kernels.ops import Ops
from support import kernel_checks, kernel_ops
from support.kernel_cases import EIGHT_GROUPS

BASE = "plain"


@dataclass(frozen=True)
class Defect:
    """In `file`, `right` becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str


DEFECTS = [
    Defect("a lone row is summed in another order", "cpu/matmul.h",
           "Product<T>::template step<M, N>(x, units, stride, k, sums);",
           "Product<T>::template step<M, N>(x, units, stride, M == 1 ? steps - 1 - k : k, sums);"),
    Defect("a row sees keys behind its own position", "mla_attention/cpu.cpp",
           "const long end = (long)positions[pair / heads] + 1 - start;",
           "const long end = (long)positions[pair / heads] + 2 - start;"),
    Defect("the past does not decay when the maximum rises", "mla_attention/cpu.cpp",
           "store(o, fma(load(o), set(r.decay[pair]), total));", "store(o, load(o) + total);"),
    Defect("slots before the first position are attended", "mla_attention/cpu.cpp",
           "r.begin = first_position > start ? (int)(first_position - start) : 0;", "r.begin = 0;"),
    Defect("masked keys of a group are multiplied by zero", "mla_attention/cpu.cpp",
           "shared = r.end[pair0 + m] < shared ? r.end[pair0 + m] : shared;",
           "shared = m == 0 || r.end[pair0 + m] > shared ? r.end[pair0 + m] : shared;"),
    Defect("equal experts go to the highest index", "moe_gate/cpu.cpp",
           "scores[i] > scores[best])) best = i;", "scores[i] >= scores[best])) best = i;"),
    Defect("the sine has the wrong sign", "rope/cpu.cpp",
           "a * c - b * s, b * c + a * s", "a * c + b * s, b * c - a * s"),
    Defect("a bfloat16 is cut instead of rounded", "cpu/lanes.h",
           "const U rounded = (bits + set_u(0x7FFF) + odd) & set_u(0xFFFF0000u);",
           "const U rounded = (bits + (odd & set_u(0))) & set_u(0xFFFF0000u);"),
    Defect("the shared expert is weighted", "moe_experts/cpu.cpp",
           "if (shared_inner) total = total + load_upto",
           "if (shared_inner) total = total + set(weights[(long)t * num_ranks]) * load_upto"),
    Defect("noise is keyed by the chunk alone", "sample/cpu.cpp",
           "philox(chunk * LANES, (uint32_t)position,", "philox(chunk * LANES, (uint32_t)0,"),
    Defect("a piece's last bytes are left out", "block_checksum/cpu.cpp",
           "if (at < num_bytes) total += word_at", "if (false) total += word_at"),
    Defect("an e4m3 number is cut instead of rounded", "cpu/fp8.h",
           "((high + set_u(0x7FFFF) + odd) >> 20)", "((high + (odd & set_u(0))) >> 20)"),
    Defect("a strip of e4m3 weights is decoded in another order", "cpu/matmul.h",
           "store(out, Product<e4m3>::weight(group, unit, code));",
           "store(out, Product<e4m3>::weight(group, unit, (code + 1) % 4));"),
]


def compile_with(defect: Defect | None, directory: Path) -> Ops:
    """The plain ops from sources with one defect."""
    sources = directory / "pd_kernels"
    shutil.copytree(pd_build.PACKAGE, sources, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.py"))
    if defect is not None:
        path = sources / defect.file
        text = path.read_text()
        assert text.count(defect.right) >= 1, f"{defect.file} does not contain {defect.right!r}"
        path.write_text(text.replace(defect.right, defect.wrong))
    target = pd_build.library_path(directory, BASE)
    compiler = pd_build.find_compiler()
    assert compiler is not None
    subprocess.run(
        [*compiler, *pd_build.FLAGS, "-O1", *pd_build.EXACT_FLAGS, f'-DPD_SOURCES="{pd_build.identity(BASE)}"',
         "-o", str(target), str(sources / "cpu" / "library.cpp")], check=True)
    pd_build.seal(target)
    return CpuOps(BASE, threads=1, directory=directory)


needs_compiler = pytest.mark.skipif(pd_build.find_compiler() is None, reason="no C++ compiler")


@needs_compiler
def test_unchanged_sources_pass_all_checks(tmp_path: Path) -> None:
    kernel_checks.check_all(compile_with(None, tmp_path), EIGHT_GROUPS)


@needs_compiler
@pytest.mark.parametrize(
    "defect", [pytest.param(d, id=d.name, marks=() if i < 1 else pytest.mark.slow) for i, d in enumerate(DEFECTS)])
def test_broken_kernel_is_caught(defect: Defect, tmp_path: Path) -> None:
    ops = compile_with(defect, tmp_path)
    with pytest.raises(AssertionError):
        kernel_checks.check_all(ops, EIGHT_GROUPS)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers' runtime")
@pytest.mark.timeout(1200)  # two builds with sanitizers, then the op tests several times as slow
def test_ops_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """Address and undefined-behaviour sanitizers over the op tests, with scratch memory of exact size."""
    compiler = pd_build.find_compiler()
    assert compiler is not None
    usable = [isa for isa in ("plain", "avx2") if isa in pd_build.isa_names()]
    assert pd_build.build(tmp_path, isas=usable, extra_flags=pd_build.SANITIZE_FLAGS)
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    tests = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
         *(str(tests / f"test_kernels_{name}.py") for name in ("cpu", "fp8", "sampling", "repeat", "blocks"))],
        cwd=tests.parents[1], check=False, capture_output=True, text=True,
        env={**os.environ, LIBRARY_DIRECTORY_VARIABLE: str(tmp_path), "LD_PRELOAD": " ".join(runtimes),
             "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0"},
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def _runtime(compiler: list[str], name: str) -> str:
    """Where the compiler keeps a sanitizer's runtime library."""
    command = [*compiler, f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_reference_passes_all_checks() -> None:
    kernel_checks.check_all(kernel_ops.load("reference"), EIGHT_GROUPS)
