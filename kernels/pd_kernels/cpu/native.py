"""Finds the compiled libraries, picks one by what the CPU can do, and declares its functions.

Torch-free. Functions are called through ctypes, which lets go of the GIL meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from pd_kernels.build import LIBRARIES, PACKAGE, REBUILD, STAMP, identity, isa_names, library_path, problem_of

LIBRARY_DIRECTORY_VARIABLE = "PD_KERNELS_LIBRARIES"  # another build (sanitizers) instead of the package's own

_REQUIRED_CPU_FLAGS = {
    "plain": frozenset[str](),
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}),
    "avx512bf16": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx2", "fma"}),
}

_P, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "pd_isa": (ctypes.c_char_p, []),
    "pd_sources": (ctypes.c_char_p, []),
    "pd_arithmetic": (ctypes.c_char_p, []),
    "pd_num_threads": (_INT, []),
    "pd_set_num_threads": (None, [_INT]),
    "pd_embed": (_LONG, [_P, _LONG, _P, _LONG, _LONG, _P]),
    "pd_rms_norm": (None, [_INT, _P, _LONG, _LONG, _INT, _P, _FLOAT, _P, _LONG]),
    "pd_add_rms_norm": (None, [_INT, _P, _P, _LONG, _INT, _P, _FLOAT, _P, _P]),
    "pd_linear": (None, [_INT, _P, _LONG, _INT, _INT, _P, _INT, _INT, _P, _INT]),
    "pd_latent_write": (
        _LONG, [_INT, _P, _LONG, _LONG, _INT, _INT, _P, _FLOAT, _P, _LONG, _P, _P, _INT, _P, _LONG]),
    "pd_mla_queries": (_LONG, [_INT, _P, _LONG, _INT, _INT, _INT, _INT, _INT, _P, _P, _LONG, _P, _P]),
    "pd_absorb_values": (None, [_INT, _P, _INT, _INT, _INT, _INT, _P, _P]),
    "pd_mla_attention": (
        _LONG, [_INT, _P, _LONG, _INT, _INT, _INT, _INT, _P, _LONG, _LONG, _P, _P, _P, _LONG, _LONG, _FLOAT, _INT,
                _P]),
    "pd_mla_attention_expanded": (
        _LONG, [_INT, _P, _LONG, _LONG, _INT, _INT, _INT, _INT, _INT, _P, _P, _P, _LONG, _INT, _P, _LONG, _LONG, _P,
                _P, _P, _LONG, _LONG, _FLOAT, _INT, _P]),
    "pd_moe_gate": (None, [_INT, _P, _LONG, _INT, _INT, _P, _P, _INT, _INT, _INT, _INT, _INT, _FLOAT, _P, _P]),
    "pd_moe_experts": (
        _LONG, [_INT, _P, _LONG, _INT, _INT, _INT, _INT, _INT, _P, _P, _INT, _P, _P, _P, _P, _INT, _P]),
    "pd_swiglu": (None, [_INT, _P, _LONG, _INT, _INT, _INT, _INT, _P, _P, _P]),
    "pd_sample": (None, [_P, _LONG, _INT, _P, _P, _P, _P, _P, _P, _P]),
    "pd_logprobs": (None, [_P, _LONG, _INT, _P]),
    "pd_checksums": (None, [_P, _LONG, _P, _P, _P]),
    "pd_copy_pieces": (None, [_P, _P, _LONG, _P, _P, _P]),
    "pd_memcpy_pieces": (None, [_P, _P, _LONG, _P, _P, _P]),
    "pd_copy_and_checksum_pieces": (None, [_P, _P, _LONG, _P, _P, _P, _P]),
    "pd_send_pieces": (_LONG, [_INT, _P, _LONG, _P, _P]),
    "pd_receive_pieces": (_LONG, [_INT, _P, _LONG, _P, _P, _P]),
    "pd_receive_and_checksum_pieces": (_LONG, [_INT, _P, _LONG, _P, _P, _P, _P]),
    "pd_find_caller": (_P, [ctypes.c_char_p]),
    "pd_run": (_LONG, [_P, _LONG, _P]),
}


class LibraryUnusable(RuntimeError):
    """A compiled library cannot be loaded; the message says why, and what to do."""


def library_directory() -> Path:
    return Path(os.environ.get(LIBRARY_DIRECTORY_VARIABLE) or PACKAGE / LIBRARIES)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the CPU and the kernel offer, by the names of /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def usable_isas() -> list[str]:
    """Instruction sets that are built and that this CPU has, best last."""
    return [
        isa for isa in isa_names()
        if _REQUIRED_CPU_FLAGS[isa] <= cpu_flags() and library_path(library_directory(), isa).exists()
    ]


def library_problem(isa: str) -> str | None:
    """Why the library of an instruction set in `library_directory()` must not be loaded, or None."""
    return problem_of(library_path(library_directory(), isa))


def load_library(isa: str, directory: Path | None = None) -> ctypes.CDLL:
    """The library of one instruction set, its functions declared.

    Args:
        directory: where it is, if not in `library_directory()`.

    Raises:
        LibraryUnusable: it is not built, damaged, was built from other sources than those beside this file or for
            another instruction set, or cannot be loaded on this host.
    """
    return _load(library_path(directory or library_directory(), isa), isa)


@functools.cache
def _load(path: Path, isa: str) -> ctypes.CDLL:
    problem = problem_of(path)
    if problem is not None:
        raise LibraryUnusable(problem)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # of another system: its C++ runtime is older, or missing
        raise LibraryUnusable(f"the compiled ops in {path} cannot be loaded: {error}") from None
    try:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise LibraryUnusable(f"the compiled ops in {path} lack a function: {error}; {REBUILD}") from None
    found = library.pd_isa().decode()
    if found != isa or not library.pd_sources().decode().startswith(STAMP + identity(isa)):
        raise LibraryUnusable(f"the compiled ops in {path} are those of {found} instead of {isa}; {REBUILD}")
    return library


def numerics(library: ctypes.CDLL) -> str:
    """What decides the bits: the sources, the compiler's flags where they are not the usual ones, and the arithmetic.
    Instruction sets with the same one give the same bits."""
    sources, _, flags = library.pd_sources().decode().removeprefix(STAMP).split("/")
    return f"cpu-{sources}{flags and '-' + flags}/{library.pd_arithmetic().decode()}"


def best_library() -> ctypes.CDLL | None:
    """The library of the best instruction set that this CPU has, or None if nothing is built.

    Raises:
        LibraryUnusable: it is there, and cannot be used.
    """
    isas = usable_isas()
    return load_library(isas[-1]) if isas else None
