"""A double of NIXL's agent: reads between memories of one process, some descriptors a poll, as late as a test wants.

Like the real one it cannot be called back: a transfer whose handle was released goes on, as long as its agent lives.
"""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kv_transfer.transports.nixl_agent import DONE, IN_PROGRESS, Regions

DESCRIPTORS_A_POLL = 64


class FakeDisconnectError(Exception):
    """The real one's errors are classes of its own, too."""


@dataclass(eq=False)
class FakeTransfer:
    local: Regions
    remote: Regions
    num_done: int = 0
    is_released: bool = False


@dataclass(eq=False)
class FakeNixlAgent:
    """Args:
    name: unique.

    Attributes:
        alive: names of all agents whose memory can be read; a test takes one out to end it.
        is_stalled: nothing arrives at any agent, and nothing fails.
    """

    name: str
    token: bytes = field(default_factory=lambda: secrets.token_bytes(8))
    registered: list[list[tuple[int, int, int, str]]] = field(default_factory=list)
    transfers: list[FakeTransfer] = field(default_factory=list)

    alive: ClassVar[dict[bytes, FakeNixlAgent]] = {}
    is_stalled: ClassVar[bool] = False

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        assert mem_type == "DRAM"
        self.registered.append(reg_list)
        return reg_list

    def deregister_memory(self, dereg_list: Any) -> None:
        self.registered.remove(dereg_list)

    def get_agent_metadata(self) -> bytes:
        self.alive[self.token] = self
        return self.token

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        assert metadata in self.alive
        return metadata

    def get_xfer_descs(self, descs: Regions, mem_type: str) -> Any:
        assert mem_type == "DRAM" and descs.shape[1] == 3
        return descs

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str | bytes) -> Any:
        assert operation == "READ" and local_descs.shape == remote_descs.shape
        assert isinstance(remote_agent, bytes)
        if not self.alive[remote_agent].registered:
            raise FakeDisconnectError
        self._check(local_descs, self)
        self._check(remote_descs, self.alive[remote_agent])
        return FakeTransfer(local_descs, remote_descs)

    def transfer(self, handle: FakeTransfer) -> str:
        self.transfers.append(handle)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: FakeTransfer) -> str:
        if not self.is_stalled:
            self.go_on(handle)
        return DONE if handle.num_done == len(handle.local) else IN_PROGRESS

    def go_on(self, handle: FakeTransfer) -> None:
        """Some more descriptors arrive, whether or not anybody waits for them."""
        part = slice(handle.num_done, handle.num_done + DESCRIPTORS_A_POLL)
        for (target, length, _), (start, _, _) in zip(
            handle.local[part].tolist(), handle.remote[part].tolist(), strict=True
        ):
            ctypes.memmove(target, start, length)
        handle.num_done = min(part.stop, len(handle.local))

    def release_xfer_handle(self, handle: FakeTransfer) -> None:
        handle.is_released = True

    def update_notifs(self) -> object:
        return {}

    def _check(self, descs: Regions, owner: FakeNixlAgent) -> None:
        [[(base, num_bytes, _, _)]] = owner.registered
        for start, length, device in descs.tolist():
            assert base <= start and start + length <= base + num_bytes and length > 0 and device == 0
