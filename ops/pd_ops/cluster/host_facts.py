"""What must be the same on every host of a cluster: the version, the ops, the checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pd_engine.model.checkpoint import weight_files
from pd_engine.model.config import CONFIG_FILE
from pd_kernels.build import source_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """`ops`: a digest of the sources of the ops; `checkpoint`: one of its configuration, and of names and sizes of its
    weights; empty if it is not there."""

    version: str
    ops: str
    checkpoint: str


def host_facts(model: str) -> HostFacts:
    """Of the host that this runs on."""
    return HostFacts(version=version("pd-relay"), ops=source_digest(), checkpoint=checkpoint_digest(Path(model)))


def checkpoint_digest(path: Path) -> str:
    try:
        config = (path / CONFIG_FILE).read_bytes()
        sizes = [(file.name, file.stat().st_size) for file in weight_files(path)]
    except OSError:
        return ""
    return hashlib.sha256(config + repr(sizes).encode()).hexdigest()


def difference(host: str, there: HostFacts, here: HostFacts, model: str) -> str | None:
    """What is wrong with a host, seen from the head: a sentence that names it."""
    if there.version != here.version:
        return f"{host} has pd-relay {there.version}, the head {here.version}"
    if there.ops != here.ops:
        return f"{host} has ops of other sources than the head, under the same version"
    if not there.checkpoint:
        return f"{host} has no checkpoint in {model}"
    if there.checkpoint != here.checkpoint:
        return f"{host} has another checkpoint in {model} than the head"
    return None
