"""The checkout under test: where it is, and what is committed in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("pd_engine", "pd_router", "prefill_worker", "decode_worker", "kv_transfer", "pd_kernels", "pd_ops")
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def tracked_files() -> list[Path]:
    """Files under version control that are there, relative to `ROOT`."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()]
    assert files, f"{ROOT} is no git checkout"
    return files


def copy_tracked(target: Path) -> None:
    """Copies them, so that a build in `target` sees no leftover of another one."""
    for path in tracked_files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path)
