"""The result of a run: one JSON document, and the same as Markdown for people."""

from __future__ import annotations

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
ROOT = Path(__file__).resolve().parents[3]


def identity(device: torch.device) -> Document:
    """Of this checkout on this GPU, now. `commit` is None where there is no git."""
    is_gpu = device.type == "cuda"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": _commit(),
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


def empty(device: torch.device, *, is_dry_run: bool) -> Document:
    """A document of nothing: what has not been done is None, or not in its list."""
    return {
        "identity": identity(device), "dry_run": is_dry_run, "checks": [], "ceilings": {}, "timings": [], "nccl": None,
        "end_to_end": None, "cluster": None, "left_out": [], "failed": False,
    }


def write(document: Document, folder: Path) -> None:
    """gpu.json and gpu.md; whoever stops it halfway finds the last whole ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("gpu.json", json.dumps(document, indent=1) + "\n"), ("gpu.md", markdown(document))):
        unfinished = folder / f"{name}.new"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / name)


def read(folder: Path, identity: Document) -> Document | None:
    """What an earlier run has written, if it was of the same commit, GPU and versions."""
    try:
        document: Document = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    same = identity["commit"] is not None and document["identity"] | {"date": identity["date"]} == identity
    return document if same else None


def markdown(document: Document) -> str:
    """Checks, what was left out, and the roofline table if anything was timed."""
    about = document["identity"]
    lines = [f"# Kernels on {about['gpu']}", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    if document["dry_run"]:
        lines += ["**A dry run: no figure in it means anything.**", ""]
    lines += ["| check | result |", "|---|---|"]
    lines += [f"| {check['name']} | {check['error'] or 'passed'} |" for check in document["checks"]]
    for name in ("end_to_end", "nccl", "cluster"):
        lines += ["", f"{name}: {document[name]}"]
    if document["left_out"]:
        lines += ["", "Left out: " + "; ".join(document["left_out"])]
    if document["timings"] and not document["dry_run"]:
        lines += ["", roofline.page(document)]
    return "\n".join(lines) + "\n"
