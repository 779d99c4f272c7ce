"""`pd-relay version`: which version this is, and of what it depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from pd_ops.commands import options

REPORTED = ("pd-relay", "ray", "torch", "grpcio", "numpy", "tokenizers", "safetensors", "triton")


def command(context: typer.Context, as_json: options.Json = False) -> None:
    """Print the version, and those of the libraries underneath."""
    output = options.start(context, as_json)
    versions = {name: found for name in REPORTED if (found := _installed(name)) is not None}
    output.document({"version": versions["pd-relay"], "python": platform.python_version(), "packages": versions})
    output.text(f"pd-relay {versions.pop('pd-relay')} (Python {platform.python_version()})")
    output.text(", ".join(f"{name} {found}" for name, found in versions.items()))


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
