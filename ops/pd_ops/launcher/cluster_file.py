"""What a launcher file (`cluster.yaml`, which Ray reads too) says of the hosts of a cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_engine.errors import InvalidArgument, shown
from pd_engine.yaml_file import read_yaml_mapping
from pd_ops.cluster.plan import POOL_LABEL, Role
from pd_ops.launcher.remote_shell import RemoteShell

WHAT = "launcher file"
PROVIDER = "pd_ops.launcher.host_provider.HostProvider"
HOST = r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?"  # names and addresses: they become part of commands


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeType:
    """Hosts of one kind.

    Attributes:
        pool: their role; None: the head's, which runs no process of ours but `serve`.
        hosts: named ones; empty where a cloud provides them.
        num_cpus: of Ray, a host.
    """

    name: str
    pool: Role | None
    hosts: tuple[str, ...]
    min_workers: int
    max_workers: int
    num_cpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """`head_host`: None where a cloud provides it. `hands`: commands that drills break hosts with."""

    path: Path
    name: str
    head_host: str | None
    node_types: tuple[NodeType, ...]
    shell: RemoteShell
    stop_command: str
    hands: Mapping[str, str]

    @property
    def hosts(self) -> list[str]:
        """All that are named, the head first."""
        return [host for kind in sorted(self.node_types, key=lambda one: one.pool is not None) for host in kind.hosts]


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises:
    InvalidArgument: it is no launcher file, or one that pools cannot be placed with; the message says where.
    """
    document = read_yaml_mapping(path, WHAT)
    try:
        provider, types = _mapping(document, "provider"), _mapping(document, "available_node_types")
        head = _text(document, "head_node_type")
        kinds = tuple(_node_type(str(name), kind, is_head=name == head) for name, kind in types.items())
        is_ours = provider.get("module") == PROVIDER
        file = ClusterFile(
            path=path, name=_text(document, "cluster_name"), node_types=kinds,
            head_host=_head_host(kinds, head) if is_ours else None,
            shell=RemoteShell.of(provider, _mapping(document, "auth")),
            stop_command=_text(provider, "stop_command") if is_ours else "",
            hands={str(name): str(command) for name, command in _optional(provider, "hands", "provider").items()},
        )
        _check_hosts(file, is_ours=is_ours)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}") from None
    return file


def _node_type(name: str, kind: Any, *, is_head: bool) -> NodeType:
    where = f"available_node_types.{name}"
    if not isinstance(kind, dict):
        raise InvalidArgument(f"{where} must be a mapping, got {shown(kind)}")
    label = _optional(kind, "labels", where).get(POOL_LABEL)
    pools = {role.value: role for role in Role}
    if not is_head and (not isinstance(label, str) or label not in pools):
        raise InvalidArgument(
            f"{where}: labels.{POOL_LABEL} must be one of {', '.join(pools)}, or nothing would run there; got "
            f"{shown(label)}"
        )
    hosts = _optional(kind, "node_config", where).get("hosts") or []
    if not isinstance(hosts, list):
        raise InvalidArgument(f"{where}.node_config.hosts must be a list, got {shown(hosts)}")
    for host in hosts:
        if not isinstance(host, str) or not re.fullmatch(HOST, host):
            raise InvalidArgument(f"{where}: a host is a name or an address, got {shown(host)}")
    return NodeType(
        name=name, pool=None if is_head else pools[str(label)], hosts=tuple(hosts),
        min_workers=_count(kind, "min_workers", where), max_workers=_count(kind, "max_workers", where),
        num_cpus=_count(_optional(kind, "resources", where), "CPU", f"{where}.resources"),
    )


def _check_hosts(file: ClusterFile, *, is_ours: bool) -> None:
    pools = {kind.pool for kind in file.node_types}
    for role in Role:
        if role not in pools:
            raise InvalidArgument(f"no node type has the label {POOL_LABEL}: {role.value}")
    for kind in file.node_types:
        where = f"available_node_types.{kind.name}"
        if kind.min_workers > kind.max_workers:
            raise InvalidArgument(f"{where}: min_workers is {kind.min_workers}, max_workers {kind.max_workers}")
        if is_ours and kind.min_workers > len(kind.hosts):
            raise InvalidArgument(f"{where}: min_workers is {kind.min_workers}, but {len(kind.hosts)} hosts are named")
    twice = [host for host, count in Counter(file.hosts).items() if count > 1]
    if twice:
        raise InvalidArgument(f"hosts that are named twice: {', '.join(twice)}")


def _head_host(kinds: tuple[NodeType, ...], head: str) -> str:
    hosts = next((kind.hosts for kind in kinds if kind.name == head), ())
    if len(hosts) != 1:
        raise InvalidArgument(f"head_node_type {head!r} must be a node type with one host, got {len(hosts)}")
    return hosts[0]


def _mapping(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise InvalidArgument(f"{key} must be a mapping, got {shown(value)}")
    return value


def _optional(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Empty if nothing stands there."""
    value = document.get(key)
    if value is not None and not isinstance(value, dict):
        raise InvalidArgument(f"{where}: {key} must be a mapping, got {shown(value)}")
    return value or {}


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{key} must be a text, got {shown(value)}")
    return value


def _count(document: Mapping[str, Any], key: str, where: str) -> int:
    value = document.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{where}: {key} must be a whole number, got {shown(value)}")
    return value
