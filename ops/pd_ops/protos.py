"""Writes the Python files of pd_engine/contracts/*.proto, or checks that those in the tree are what it would write.

    python -m pd_ops.protos            write them
    python -m pd_ops.protos --check    exit status 1, and the names, if one is missing or stale
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from pd_engine.errors import InvalidArgument

CONTRACTS = Path("pd_engine/contracts")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(root: Path, target: Path) -> list[Path]:
    """Runs protoc on every contract of the checkout `root`; files and folders appear under `target`.

    Returns:
        What was written, relative to `target`, in order of name.

    Raises:
        InvalidArgument: protoc refused, with its own message.
    """
    protos = sorted(path.relative_to(root) for path in (root / CONTRACTS).glob("*.proto"))
    assert protos, f"no .proto files in {root / CONTRACTS}"
    # protoc finds its plugin for typed stubs on PATH: beside the interpreter, whether or not the venv is activated.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *map(str, protos)]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise InvalidArgument(f"protoc: {result.stderr.strip()}")
    return sorted(
        proto.with_name(proto.stem + suffix)
        for proto in protos
        for suffix in SUFFIXES
        if (target / proto.with_name(proto.stem + suffix)).exists()
    )


def stale_files(root: Path) -> list[str]:
    """One line for each generated file of the checkout that is missing, differs, or has no .proto any more."""
    with tempfile.TemporaryDirectory(prefix="pd-relay-protos-") as folder:
        fresh = {path: (Path(folder) / path).read_bytes() for path in generate(root, Path(folder))}
    present = {path.relative_to(root) for suffix in SUFFIXES for path in (root / CONTRACTS).glob(f"*{suffix}")}
    problems = [f"{path}: missing" for path in sorted(fresh.keys() - present)]
    problems += [f"{path}: has no .proto" for path in sorted(present - fresh.keys())]
    problems += [
        f"{path}: differs from what its .proto gives"
        for path in sorted(present & fresh.keys())
        if (root / path).read_bytes() != fresh[path]
    ]
    return problems


def main(check: bool = typer.Option(False, "--check", help="write nothing; exit 1 if a file is stale")) -> None:
    root = Path(__file__).resolve().parents[2]
    if not check:
        for path in generate(root, root):
            print(path)
        return
    problems = stale_files(root)
    if problems:
        print("\n".join([*problems, "write them again with: make protos"]), file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
