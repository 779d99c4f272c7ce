"""What a result is a result of: commit, versions, processor, load. Printed with every benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pd_ops
from pd_ops.bench.measured_process import Document

PACKAGES = ("pd-relay", "torch", "numpy", "grpcio", "transformers", "triton")
INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")


def identity() -> Document:
    """Of this checkout (or installation) on this host, now.

    `commit` is None outside a checkout; `dirty`: tracked files differ from it. `load_1m`: of the last minute, so that
    a reader sees how much else was running.
    """
    flags = cpu_flags()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(), "dirty": is_dirty(), "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := installed(name)) is not None},
        "cpu_model": cpu_model(), "cores": os.cpu_count(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "load_1m": round(os.getloadavg()[0], 2),
    }


def identity_text(document: Document) -> str:
    """The same for people, in two lines."""
    sets = ", ".join(document["instruction_sets"]) or "no vector extensions"
    packages = ", ".join(f"{name} {found}" for name, found in document["packages"].items())
    state = "" if not document["dirty"] else ", with changes"
    source = "no checkout" if document["commit"] is None else f"commit {document['commit']}{state}"
    return (
        f"{document['date']}, {source}; {document['cpu_model']} ({sets}), {document['cores']} cores, load "
        f"{document['load_1m']}\nPython {document['python']}, {packages}"
    )


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    names = _cpuinfo("model name")
    return names[0] if names else platform.processor() or "unknown"


def cpu_flags() -> frozenset[str]:
    return frozenset(word for line in _cpuinfo("flags")[:1] for word in line.split())


def commit() -> str | None:
    """12 digits, or None outside a checkout."""
    return _git("rev-parse", "--short=12", "HEAD") or None


def is_dirty() -> bool | None:
    return None if commit() is None else bool(_git("status", "--porcelain", "--untracked-files=no"))


def _cpuinfo(field: str) -> Sequence[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == field]


def _git(*arguments: str) -> str:
    """Its answer about the checkout that this file is in; empty without one."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=Path(pd_ops.__file__).parent, check=False, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
