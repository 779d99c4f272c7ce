"""A NIXL agent that reads one source's memory, and the staging memory that its reads land in. Used from one thread."""

from __future__ import annotations

import time

import numpy as np

from kv_transfer.transport import Bytes, Int64s
from kv_transfer.transports.interest import Interest
from kv_transfer.transports.nixl_agent import DONE, IN_PROGRESS, MEMORY, NixlAgent, Regions
from pd_engine.errors import Unavailable

LEAST_STAGING_BYTES = 8 * 1024 * 1024
FIRST_POLLS = 200           # without a pause: small reads are done by then
POLL_PERIOD_S = 0.000_1


class NixlReader:
    """An agent, and the memory that its reads land in."""

    def __init__(self, agent: NixlAgent, metadata: bytes) -> None:
        self._agent: NixlAgent | None = agent
        self._remote = agent.add_remote_agent(metadata)
        self._staging: Bytes = np.empty(0, dtype=np.uint8)
        self._registration: object | None = None

    def staging(self, num_bytes: int) -> Bytes:
        """At least so many bytes, with room to align; nothing is in flight to it."""
        assert self._agent is not None
        if len(self._staging) < num_bytes + 8:
            if self._registration is not None:
                self._agent.deregister_memory(self._registration)
            self._staging = np.empty(max(LEAST_STAGING_BYTES, 2 * (num_bytes + 8)), dtype=np.uint8)
            region = (self._staging.ctypes.data, len(self._staging), 0, "")
            self._registration = self._agent.register_memory([region], MEMORY)
        return self._staging

    def read(self, addresses: Int64s, offsets: Int64s, lengths: Int64s, interest: Interest) -> None:
        """Ranges of the source's memory into the staging memory; returns when all of it is there.

        Raises:
            Unavailable: the source is gone, or the fetch was abandoned.
        """
        assert self._agent is not None
        local = self._agent.get_xfer_descs(_regions(self._staging.ctypes.data + offsets, lengths), MEMORY)
        remote = self._agent.get_xfer_descs(_regions(addresses, lengths), MEMORY)
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, self._remote)
            state, num_polls = self._agent.transfer(handle), 0
            while state == IN_PROGRESS and not interest.is_abandoned:
                num_polls += 1
                if num_polls > FIRST_POLLS:
                    time.sleep(POLL_PERIOD_S)
                state = self._agent.check_xfer_state(handle)
            if state == DONE:
                self._agent.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - NIXL's share no base class: whatever it is, this peer is lost
            raise Unavailable(f"the source is gone: {type(error).__name__}") from None
        if state != DONE:
            raise Unavailable("this fetch was abandoned" if interest.is_abandoned else "the source is gone")

    def end(self, *, is_quiet: bool) -> None:
        """Ends the agent, and with it whatever is in flight; only then is the memory given back."""
        if is_quiet and self._agent is not None and self._registration is not None:
            self._agent.deregister_memory(self._registration)
        self._registration = self._agent = None
        self._staging = np.empty(0, dtype=np.uint8)


def _regions(addresses: Int64s, lengths: Int64s) -> Regions:
    return np.stack([addresses, lengths, np.zeros_like(lengths)], axis=1).astype(np.uint64)
