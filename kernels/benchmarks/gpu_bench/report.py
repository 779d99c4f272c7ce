"""The result of a run: one JSON document, and the same as Markdown for people."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from gpu_bench import roofline

Document = dict[str, Any]
TRACE = "\nTraceback "  # what follows an error's own words
ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("kernels", "pd_engine", "prefill_worker", "decode_worker", "tests/support")  # what a run's result depends on


def identity(device: torch.device) -> Document:
    """Of this checkout on this GPU, now. `commit` is None where there is no git, `sources` a digest anywhere."""
    is_gpu = device.type == "cuda"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": _commit(), "sources": _digest(),
        "gpu": torch.cuda.get_device_name(device) if is_gpu else "none: kernels were interpreted",
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
    }


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True,
                              check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _digest() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def empty(device: torch.device, *, is_dry_run: bool) -> Document:
    """A document of nothing: what has not been done is None, or not in its list.

    `checks` are those that have passed, `running` is what is being done, and `errors` says why something has no result.
    """
    return {
        "identity": identity(device), "dry_run": is_dry_run, "checks": [], "ceilings": {}, "timings": [], "nccl": None,
        "end_to_end": None, "cluster": None, "left_out": [], "errors": {}, "running": None, "failed": False,
    }


def write(document: Document, folder: Path) -> None:
    """gpu.json and gpu.md; whoever stops it halfway finds the last whole ones."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "gpu.json", json.dumps(document, indent=1) + "\n")
    _replace(folder / "gpu.md", markdown(document))


def _replace(file: Path, text: str) -> None:
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def read(folder: Path) -> Document | None:
    """What has been written there."""
    try:
        document: Document = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document


def read_same(folder: Path, identity: Document) -> Document | None:
    """What an earlier run has written, if it was of the same sources, GPU and versions."""
    document, passing = read(folder), {"date": None, "commit": None}
    return document if document and document["identity"] | passing == identity | passing else None


def markdown(document: Document) -> str:
    """Checks, what failed or was left out, and the roofline table if anything was timed."""
    about = document["identity"]
    lines = [f"# Kernels on {about['gpu']}", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    if document["dry_run"]:
        lines += ["**A dry run: no figure in it means anything.**", ""]
    if document["failed"]:
        lines += ["**Something failed**, named below. Where checks failed, figures may be of wrong results.", ""]
    if document["running"]:
        lines += [f"Not at its end: {document['running']} was under way.", ""]
    lines += [f"Checks passed: {'; '.join(document['checks']) or 'none'}"]
    for name in ("end_to_end", "nccl", "cluster"):
        lines += ["", f"{name}: {document[name]}"]
    if document["errors"]:
        lines += ["", "| failed | why |", "|---|---|"]
        parted = {name: error.partition(TRACE) for name, error in document["errors"].items()}
        lines += [f"| {name} | {_cell(words)} |" for name, (words, _, _) in parted.items()]
        for name, (_, begin, trace) in parted.items():
            if begin:
                lines += ["", f"{name}:", "", "```", f"{begin.lstrip()}{trace.rstrip()}", "```"]
    if document["left_out"]:
        lines += ["", "Left out: " + "; ".join(document["left_out"])]
    if document["timings"] and not document["dry_run"]:
        lines += ["", roofline.page(document)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """On one line of a table."""
    return " ".join(text.replace("|", "\\|").split())
