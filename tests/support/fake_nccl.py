"""A double of NCCL: pairs inside one process, as late, stalled or lost as a test wants."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kv_transfer.transport import Bytes
from kv_transfer.transports.nccl_pair import STAGING_BYTES, UNIQUE_ID_BYTES, PairState


@dataclass(eq=False)
class FakePair:
    """One end. A message is over, at both ends, when one has sent it and the other has asked for it."""

    nccl: FakeNccl
    peer: FakePair | None = None
    outgoing: Bytes | None = None
    wanted_bytes: int | None = None
    incoming: Bytes = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    is_aborted: bool = False
    is_lost: bool = False

    def state(self) -> PairState:
        with self.nccl.lock:
            assert not self.is_aborted
            if self.peer is None:
                return PairState.BUSY
            if self.is_lost or self.peer.is_aborted:
                return PairState.LOST
            if self.nccl.is_stalled and (self.outgoing is not None or self.wanted_bytes is not None):
                return PairState.BUSY
            for sender, receiver in ((self, self.peer), (self.peer, self)):
                if sender.outgoing is not None and receiver.wanted_bytes is not None:
                    assert len(sender.outgoing) == receiver.wanted_bytes, "both ends cut alike"
                    receiver.incoming, sender.outgoing, receiver.wanted_bytes = sender.outgoing, None, None
            return PairState.READY if self.outgoing is None and self.wanted_bytes is None else PairState.BUSY

    def send(self, octets: Bytes) -> None:
        assert self.outgoing is None and len(octets) <= STAGING_BYTES
        self.outgoing = octets.copy()

    def receive(self, num_bytes: int) -> None:
        assert self.wanted_bytes is None and num_bytes <= STAGING_BYTES
        self.wanted_bytes = num_bytes

    def received(self) -> Bytes:
        return self.incoming

    def abort(self) -> None:
        with self.nccl.lock:
            assert not self.is_aborted, "aborted twice"
            self.is_aborted = True


@dataclass(eq=False)
class FakeNccl:
    """Attributes:
    is_stalled: no message goes on, and none fails.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    pairs: list[FakePair] = field(default_factory=list)
    waiting: dict[bytes, FakePair] = field(default_factory=dict)
    is_stalled: bool = False

    shared: ClassVar[FakeNccl]

    def unique_id(self) -> bytes:
        return secrets.token_bytes(UNIQUE_ID_BYTES)

    def join(self, unique_id: bytes, rank: int) -> FakePair:
        with self.lock:
            pair = FakePair(self)
            self.pairs.append(pair)
            if unique_id in self.waiting:
                pair.peer = self.waiting.pop(unique_id)
                pair.peer.peer = pair
            else:
                self.waiting[unique_id] = pair
            return pair


FakeNccl.shared = FakeNccl()
