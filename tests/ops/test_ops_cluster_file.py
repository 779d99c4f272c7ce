"""What is read of a launcher file, and what is wrong with one is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_engine.errors import InvalidArgument
from pd_ops.cluster.plan import Role
from pd_ops.launcher.cluster_file import read_cluster_file
from support.checkout import ROOT


def written(directory: Path, **changes: Any) -> Path:
    """The launcher file at the root; "a.b" changes what stands there, None takes it out."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    for dotted, value in changes.items():
        *above, key = dotted.split(".")
        target = document
        for name in above:
            target = target[name]
        if value is None:
            del target[key]
        else:
            target[key] = value
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_the_file_at_the_root() -> None:
    file = read_cluster_file(ROOT / "cluster.yaml")
    assert (file.name, file.head_host, file.hosts[0]) == ("pd-relay", "head.example", "head.example")
    assert [(kind.pool, len(kind.hosts)) for kind in file.node_types] == [
        (None, 1), (Role.ROUTER, 1), (Role.PREFILL, 2), (Role.DECODE, 2),
    ]
    assert file.shell.prefix[0] == "ssh"
    assert file.shell.argv("decode-1.example", "true")[-2:] == ["relay@decode-1.example", "true"]


TYPES = "available_node_types"


@pytest.mark.parametrize(("changes", "message"), [
    ({f"{TYPES}.decode.labels.pool": "decoders"}, r"labels.pool must be one of router, prefill, decode.*decoders"),
    ({f"{TYPES}.decode": None}, "no node type has the label pool: decode"),
    ({f"{TYPES}.decode.min_workers": 3, f"{TYPES}.decode.max_workers": 3}, "min_workers is 3, but 2 hosts are named"),
    ({f"{TYPES}.decode.max_workers": 1}, "min_workers is 2, max_workers 1"),
    ({f"{TYPES}.decode.node_config.hosts": ["head.example", "b"]}, "named twice: head.example"),
    ({f"{TYPES}.decode.node_config.hosts": ["a; reboot", "b"]}, "a host is a name or an address, got a; reboot"),
    ({f"{TYPES}.decode.node_config.hosts": ["-oProxyCommand=x", "b"]}, "a host is a name or an address"),
    ({f"{TYPES}.head.node_config.hosts": []}, "must be a node type with one host, got 0"),
    ({f"{TYPES}.prefill.resources.CPU": "four"}, "CPU must be a whole number, got four"),
    ({"provider.stop_command": None}, "stop_command must be a text"),
    ({"provider.shell": "ssh relay@host"}, "command line with {host} in it"),
    ({"auth": None}, "auth must be a mapping, got None"),
    ({"auth.ssh_private_key": 5}, "auth.ssh_private_key must be a text, got 5"),
    ({"provider.shell": "ssh '{host}"}, r"provider.shell is no command line \(No closing quotation\)"),
    ({"provider.hands": ["kill"]}, "provider: hands must be a mapping"),
    ({f"{TYPES}.decode.labels": ["pool"]}, "decode: labels must be a mapping"),
    ({f"{TYPES}.decode.labels.pool": ["decode"]}, "labels.pool must be one of"),
    ({f"{TYPES}.decode.node_config": "b"}, "decode: node_config must be a mapping, got b"),
    ({f"{TYPES}.decode.resources": 1}, "decode: resources must be a mapping, got 1"),
])
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_cluster_file(written(tmp_path, **changes))


@pytest.mark.parametrize("text", [b"", b"- a", b"\xff", b"a: [", b"provider: 3"])
def test_what_is_no_launcher_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(text)
    with pytest.raises(InvalidArgument, match=str(path)):
        read_cluster_file(path)
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_cluster_file(tmp_path / "none.yaml")
