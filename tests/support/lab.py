"""A cluster of many hosts on this machine: the launcher file at the root, on the hosts of a lab network."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.checkout import ROOT
from support.commands import Finished, run_anew
from support.lab_network import LabNetwork
from support.lab_records import recorded, remove_abandoned

# The launcher file's node types, each with its hosts here.
HOSTS: Mapping[str, tuple[str, ...]] = {
    "head": ("head",), "router": ("router-1",), "prefill": ("prefill-1", "prefill-2"),
    "decode": ("decode-1", "decode-2", "decode-3"),
}
UP_TIMEOUT_S = 280.0


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Attributes:
    file: its launcher file.
    """

    network: LabNetwork
    file: Path
    directory: Path

    def command(self, *arguments: str | Path, timeout_s: float = UP_TIMEOUT_S) -> Finished:
        """`pd-relay`, typed on this machine."""
        return run_anew(*arguments, timeout_s=timeout_s, PD_RELAY_STATE_DIR=str(self.directory))

    def on_head(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S) -> Finished:
        """`pd-relay`, typed on the head."""
        line = shlex.join(["pd-relay/.venv/bin/python", "-m", "pd_ops.cli", *arguments])
        done = subprocess.run(
            [*self.network.shell(self.network.host("head").address), line], capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=timeout_s, check=False,
        )
        return Finished(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@contextmanager
def booted_lab(
    directory: Path, settings: Mapping[str, Any], hosts: Mapping[str, tuple[str, ...]] = HOSTS
) -> Iterator[Lab]:
    """All hosts run, and nothing on them yet. At the end they are gone, whatever runs there; so are those of labs whose
    process was killed."""
    directory.chmod(0o700)
    names = [name for group in hosts.values() for name in group]
    network = LabNetwork.plan(directory, names, kept=needed_paths(directory), environment={
        "PYTHONPATH": os.pathsep.join(str(path) for path in (ROOT, ROOT / "kernels", ROOT / "ops")),
    })
    remove_abandoned()
    with recorded(network):
        network.make()
        for host in network.hosts:
            _install(directory / host.name / "home" / "pd-relay", settings)
            network.boot(host)
        file = directory / "cluster.yaml"
        file.write_text(yaml.safe_dump(lab_file(network, hosts)), encoding="utf-8")
        yield Lab(network=network, file=file, directory=directory)


def needed_paths(directory: Path) -> list[str]:
    """Paths below /tmp that a host of a lab in that directory has to see."""
    return sorted({str(path) for path in (ROOT, Path(sys.prefix), directory) if path.is_relative_to("/tmp")})


def _install(checkout: Path, settings: Mapping[str, Any]) -> None:
    """What `file_mounts` and `setup_commands` make elsewhere, without a copy."""
    (checkout / "ops" / "deploy").mkdir(parents=True)
    (checkout / ".venv").symlink_to(sys.prefix)
    shutil.copy(ROOT / "ops" / "deploy" / "host.env", checkout / "ops" / "deploy")
    (checkout / "ops" / "deploy" / "settings.yaml").write_text(yaml.safe_dump(dict(settings)), encoding="utf-8")


def lab_file(network: LabNetwork, hosts: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The launcher file at the root, with the lab's hosts, its shell for ssh, and nothing to copy or to set up."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    for name, names in hosts.items():
        kind = document["available_node_types"][name]
        kind["node_config"]["hosts"] = [network.host(one).address for one in names]
        if name != document["head_node_type"]:
            kind["min_workers"] = kind["max_workers"] = len(names)
    document["max_workers"] = len(network.hosts) - 1
    document["provider"] |= {"shell": shlex.join(network.shell()), "hands": network.hands()}
    return document | {"auth": {"ssh_user": "root"}, "file_mounts": {}, "setup_commands": []}
