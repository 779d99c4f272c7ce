"""Compiles the CPU ops: one library an instruction set, all from cpu/library.cpp.

`python -m pd_kernels.build [--sanitize]` builds in place; the package's own build calls `build` too. Without a
compiler nothing is built, and the torch reference serves. Imports neither torch nor numpy: it runs inside pip.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).parent
SOURCE = PACKAGE / "cpu" / "library.cpp"
LIBRARIES = "lib"
REBUILD = "`python -m pd_kernels.build` builds them anew"
SEAL_BYTES = 32
USUAL_COMPILERS = (("g++",), ("c++",), ("clang++",))

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
}
# No contraction: an fma stands where the source says so. GCC's AVX-512 headers warn about themselves.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)
SANITIZE_FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def isa_names() -> list[str]:
    """Instruction sets that this architecture's compiler can be asked for, plainest first."""
    return list(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["plain"]


def library_path(directory: Path, isa: str) -> Path:
    return directory / f"libpd_kernels_{isa}.so"


@functools.cache
def source_digest() -> str:
    """Of everything that the libraries are compiled from: a library of other sources is never loaded."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.glob("cpu/*.h"), *PACKAGE.glob("*/*.cpp")]):
        digest.update(path.read_bytes())
    digest.update(repr((FLAGS, ISA_FLAGS)).encode())
    return digest.hexdigest()[:12]


def seal(path: Path) -> None:
    """Ends a library with the SHA-256 of what it holds. The loader reads nothing behind a library's sections."""
    content = path.read_bytes()
    path.write_bytes(content + hashlib.sha256(content).digest())


def problem_of(path: Path) -> str | None:
    """Why the library must not be loaded, or None. To load one that is cut short would end the process."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"the compiled ops in {path} cannot be read: {error.strerror}; {REBUILD}"
    library, sealed = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    if hashlib.sha256(library).digest() != sealed:
        return f"the compiled ops in {path} are damaged or were built by another version; {REBUILD}"
    if _stamp() not in library:
        return f"the compiled ops in {path} were built from other sources; {REBUILD}"
    return None


def _stamp() -> bytes:
    """What a library of these sources holds (cpu/library.cpp)."""
    return f"pd-sources-{source_digest()}".encode()


def find_compiler() -> list[str] | None:
    """The command that compiles: $CXX with its arguments ("ccache g++ -m64"), or the first of the usual names that is
    installed. None if there is no such program."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in [wanted] if wanted else USUAL_COMPILERS:
        if (path := shutil.which(name)) is not None:
            return [path, *arguments]
    return None


def build(directory: Path, *, isas: list[str] | None = None, extra_flags: tuple[str, ...] = ()) -> list[Path]:
    """Compiles the libraries into `directory`; the paths of those that were built, none without a compiler.

    A library that is there already, from the same sources, is kept. An instruction set that the compiler does not
    know is left out, and said.
    """
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX", "").strip()
        missing = f"$CXX says {wanted!r}, which is not installed" if wanted else "no C++ compiler found"
        print(f"pd_kernels: {missing}; the torch reference will serve instead of the CPU ops")
        return []
    directory.mkdir(parents=True, exist_ok=True)

    def compile_one(isa: str) -> Path | None:
        target = library_path(directory, isa)
        if not extra_flags and problem_of(target) is None:
            return target
        with tempfile.NamedTemporaryFile(dir=directory, suffix=".so", delete=False) as scratch:
            scratch_path = Path(scratch.name)
        command = [*compiler, *FLAGS, *ISA_FLAGS[isa], *extra_flags, f'-DPD_SOURCES="{source_digest()}"',
                   "-o", str(scratch_path), str(SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            scratch_path.unlink()
            print(f"pd_kernels: {isa} left out, {' '.join(command)} failed:\n{result.stderr}", file=sys.stderr)
            return None
        seal(scratch_path)
        scratch_path.chmod(0o755)
        scratch_path.rename(target)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return [path for path in pool.map(compile_one, isas or isa_names()) if path is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CPU ops in place.")
    parser.add_argument("--isa", action="append", choices=isa_names(), help="only this one (may be repeated)")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    parser.add_argument("--output", type=Path, default=PACKAGE / LIBRARIES, help="directory of the libraries")
    arguments = parser.parse_args()
    built = build(arguments.output, isas=arguments.isa, extra_flags=SANITIZE_FLAGS if arguments.sanitize else ())
    for path in built:
        print(path)
    return 0 if built or find_compiler() is None else 1


if __name__ == "__main__":
    sys.exit(main())
