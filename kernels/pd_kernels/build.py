"""Compiles the CPU ops: one library an instruction set, all from cpu/library.cpp.

`python -m pd_kernels.build` builds in place; the package's own build calls `build` too. Without a compiler nothing is
built, and the torch reference serves. Imports neither torch nor numpy: it runs inside pip.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).parent
SOURCE = PACKAGE / "cpu" / "library.cpp"
LIBRARIES = "lib"
REBUILD = "`python -m pd_kernels.build` builds them anew"
SEAL_BYTES = 32
STAMP = "pd-sources-"
SCRATCH = "building-"
ABANDONED_S = 3600.0  # no build takes as long
USUAL_COMPILERS = (("g++",), ("c++",), ("clang++",))

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
}
# GCC's AVX-512 headers warn about themselves.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)
# Behind all others: what $CXX says changes no bits. No contraction: an fma stands where the source says so.
EXACT_FLAGS = (
    "-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-associative-math", "-fno-reciprocal-math",
    "-fno-finite-math-only", "-fsigned-zeros", "-ftrapping-math", "-ffp-contract=off", "-fno-math-errno",
)
SANITIZE_FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


# Loads a library and asks for its instruction set: no vector instruction runs, any CPU can.
_LOOK = """
import ctypes, sys
isa = ctypes.CDLL(sys.argv[1]).pd_isa
isa.restype = ctypes.c_char_p
sys.exit(None if isa() == sys.argv[2].encode() else f"it holds ops for {isa().decode()}")
"""


class NoCompiler(RuntimeError):
    """There is no C++ compiler to be run; the message says why."""


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
    digest.update(repr((FLAGS, ISA_FLAGS, EXACT_FLAGS)).encode())
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
    if f"{STAMP}{source_digest()}/".encode() not in library:
        return f"the compiled ops in {path} were built from other sources; {REBUILD}"
    isa = path.stem.removeprefix("libpd_kernels_")
    if f"{STAMP}{source_digest()}/{isa}/".encode() not in library:
        return f"the compiled ops in {path} are those of another instruction set than {isa}; {REBUILD}"
    return None


def identity(isa: str, flags: tuple[str, ...] = ()) -> str:
    """What a library of these sources says of itself behind `STAMP` (cpu/library.cpp): sources, instruction set, and
    a digest of the flags beside those of this file, empty without any."""
    return f"{source_digest()}/{isa}/{hashlib.sha256(repr(flags).encode()).hexdigest()[:8] if flags else ''}"


def compiler_command() -> list[str]:
    """The command that compiles: $CXX with its arguments ("ccache g++ -m64"), or the first of the usual names that is
    installed.

    Raises:
        NoCompiler: there is no such program.
    """
    named = os.environ.get("CXX", "").strip()
    try:
        wanted = shlex.split(named)
    except ValueError as error:
        raise NoCompiler(f"$CXX says {named!r}, which cannot be read: {error}") from None
    for name, *arguments in [wanted] if wanted else USUAL_COMPILERS:
        if (path := shutil.which(name)) is not None:
            return [path, *arguments]
    raise NoCompiler(f"$CXX says {named!r}, which is not installed" if wanted else "none is installed")


def find_compiler() -> list[str] | None:
    """`compiler_command()`, or None without a compiler."""
    try:
        return compiler_command()
    except NoCompiler:
        return None


def build(directory: Path, *, isas: list[str] | None = None, extra_flags: tuple[str, ...] = ()) -> list[Path]:
    """Compiles the libraries into `directory`; the paths of those that were built, none without a compiler.

    A library that is there already, from the same sources with the same flags, is kept. An instruction set that the
    compiler does not know, or whose library cannot be loaded, is left out, and said.

    Args:
        extra_flags: a sanitizer's, whose runtime must be preloaded: whether such a library can be loaded is not tried.
    """
    try:
        compiler = compiler_command()
    except NoCompiler as error:
        print(f"pd_kernels: no compiler: {error}; the torch reference will serve instead of the CPU ops")
        return []
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    flags = (*itertools.dropwhile(lambda word: not word.startswith("-"), compiler[1:]), *extra_flags)

    def build_one(isa: str) -> Path | None:
        target = library_path(directory, isa)
        if problem_of(target) is None and _is_of(target, identity(isa, flags)):
            return target
        made = library_path(Path(scratch), isa)
        command = [*compiler, *FLAGS, *ISA_FLAGS[isa], *extra_flags, *EXACT_FLAGS,
                   f'-DPD_SOURCES="{identity(isa, flags)}"', "-o", str(made), str(SOURCE)]
        problem = _compile(command, made, identity(isa, flags))
        if problem is None and not extra_flags:
            problem = _load_problem(made, isa)
        if problem is not None:
            print(f"pd_kernels: {isa} left out, {' '.join(command)} {problem}", file=sys.stderr)
            return None
        seal(made)
        made.chmod(0o755)
        made.rename(target)
        return target

    with (
        tempfile.TemporaryDirectory(dir=directory, prefix=SCRATCH) as scratch,
        ThreadPoolExecutor(max_workers=os.cpu_count()) as pool,
    ):
        return [path for path in pool.map(build_one, isas or isa_names()) if path is not None]


def _sweep(directory: Path) -> None:
    """Takes away what builds that were killed have left."""
    for path in directory.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another build was first
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path)


def _is_of(path: Path, what: str) -> bool:
    return f"{STAMP}{what}\0".encode() in path.read_bytes()


def _compile(command: list[str], made: Path, what: str) -> str | None:
    """Why the command has not made that library, or None."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    if result.returncode != 0:
        return f"failed:\n{result.stderr}"
    return None if made.exists() and _is_of(made, what) else "ended well, but has not written the library"


def _load_problem(made: Path, isa: str) -> str | None:
    """Why the library cannot be loaded, or None; seen in another process, which it may end."""
    command = [sys.executable, "-I", "-S", "-c", _LOOK, str(made), isa]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    said = result.stderr.strip().splitlines() or [f"the process ended with {result.returncode}"]
    return f"ended well, but its library cannot be used: {said[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CPU ops in place.")
    parser.add_argument("--isa", action="append", choices=isa_names(), help="only this one (may be repeated)")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    parser.add_argument("--output", type=Path, help="directory of the libraries, if not the package's own")
    arguments = parser.parse_args()
    if arguments.sanitize and arguments.output is None:
        parser.error("--sanitize needs --output: such libraries cannot be loaded by the package")
    directory = arguments.output or PACKAGE / LIBRARIES
    built = build(directory, isas=arguments.isa, extra_flags=SANITIZE_FLAGS if arguments.sanitize else ())
    for path in built:
        print(path)
    return 0 if built or find_compiler() is None else 1


if __name__ == "__main__":
    sys.exit(main())
