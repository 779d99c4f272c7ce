"""Which hosts belong to a cluster, and as what: a small file that Ray's launcher and its autoscaler each keep."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

Tags = dict[str, str]
SEPARATOR = "~"


@dataclass(kw_only=True, slots=True)
class HostStates:
    """Attributes:
    tags: Ray's, by node id.
    last_used: of hosts, as a count that only goes up: the one that was let go longest ago is taken first.
    num_lives: node ids that were given.
    """

    tags: dict[str, Tags] = field(default_factory=dict)
    last_used: dict[str, int] = field(default_factory=dict)
    num_lives: int = 0

    def free(self, hosts: list[str]) -> list[str]:
        """Of these, those in no use; the one that was let go longest ago first."""
        used = {host_of(node_id) for node_id in self.tags}
        return sorted((host for host in hosts if host not in used), key=lambda host: self.last_used.get(host, 0))

    def take(self, host: str, tags: Mapping[str, str], *, is_head: bool) -> str:
        """The node id of another life of this host. A head has one life: its id is its host's name.

        (The autoscaler wedges when an id ends and begins again between two of its looks.)"""
        self.num_lives += 1
        node_id = host if is_head else f"{host}{SEPARATOR}{self.num_lives}"
        self.tags[node_id] = dict(tags)
        return node_id

    def let_go(self, node_id: str) -> None:
        self.tags.pop(node_id, None)
        self.num_lives += 1
        self.last_used[host_of(node_id)] = self.num_lives

    def matching(self, filters: Mapping[str, str]) -> list[str]:
        return [node_id for node_id, tags in self.tags.items() if filters.items() <= tags.items()]


def host_of(node_id: str) -> str:
    return node_id.partition(SEPARATOR)[0]


class HostStateFile:
    """Locked while it is open, by any process of this host; what was changed is written when it closes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def opened(self) -> Iterator[HostStates]:
        fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            before = self._read()
            states = HostStates(**json.loads(before))
            yield states
            after = json.dumps(asdict(states))
            if after != before:
                temporary = self._path.with_suffix(".tmp")
                temporary.write_text(after, encoding="utf-8")
                os.replace(temporary, self._path)
        finally:
            os.close(fd)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return json.dumps(asdict(HostStates()))
