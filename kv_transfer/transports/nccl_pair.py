"""What the nccl transport needs of NCCL: communicators of two ranks, each with staging memory on the device.

The real one is nccl4py over a stream of torch's, from the extra `gpu`. It is written after their documentation and was
never run between two GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from kv_transfer.transport import Bytes
from pd_engine.errors import FailedPrecondition, Unavailable

SOURCE_RANK, PULLER_RANK = 0, 1
STAGING_BYTES = 8 * 1024 * 1024
UNIQUE_ID_BYTES = 128


class PairState(Enum):
    BUSY = "busy"    # connecting, or a message is on its way
    READY = "ready"  # for the next message
    LOST = "lost"    # the peer or the library failed: only `abort` may follow


class Pair(Protocol):
    """One end of a communicator of two ranks. Used from one thread; nothing blocks, `state` says how far it is."""

    def state(self) -> PairState: ...

    def send(self, octets: Bytes) -> None:
        """Begins to send at most STAGING_BYTES, which have been copied when it returns."""

    def receive(self, num_bytes: int) -> None:
        """Begins to receive at most STAGING_BYTES into the staging memory."""

    def received(self) -> Bytes:
        """What has been received, in host memory, until the next call."""

    def abort(self) -> None:
        """Ends it at once, whatever is on its way. The peer's end is lost then; no other pair notices."""


class Nccl(Protocol):
    """The library."""

    def unique_id(self) -> bytes:
        """UNIQUE_ID_BYTES that name a communicator to come."""

    def join(self, unique_id: bytes, rank: int) -> Pair:
        """Begins to connect."""


MakeNccl = Callable[[], Nccl]


def load_nccl() -> Nccl:
    """Raises: FailedPrecondition: nccl4py is not installed, or there is no GPU."""
    try:
        core, torch = importlib.import_module("nccl.core"), importlib.import_module("torch")
    except ImportError:
        raise FailedPrecondition("transport nccl needs the extra: pip install 'pd-relay[gpu]'") from None
    if not torch.cuda.is_available():
        raise FailedPrecondition("transport nccl needs a GPU; there is none here")
    return _Nccl4py(core, torch)


class _Nccl4py:
    def __init__(self, core: Any, torch: Any) -> None:
        self._core = core
        self._torch = torch

    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id())

    def join(self, unique_id: bytes, rank: int) -> Pair:
        config = self._core.NCCLConfig(blocking=False)
        communicator = self._core.Communicator.init(2, rank, self._core.UniqueId.from_bytes(unique_id), config)
        return _Nccl4pyPair(communicator, PULLER_RANK - rank, self._torch)


class _Nccl4pyPair:
    """Messages go host -> pinned host -> device -> peer and back, in the order of one stream. While the communicator is
    in progress nothing else may be put on that stream, so what follows a message waits in `_after`."""

    def __init__(self, communicator: Any, peer: int, torch: Any) -> None:
        self._communicator = communicator
        self._peer = peer
        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._done: Any = None  # the event at the end of the last message
        self._after: Callable[[], object] | None = None
        self._pinned = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cuda")
        self._num_bytes = 0

    def state(self) -> PairState:
        result = self._communicator.get_async_error().name
        if result == "InProgress":
            return PairState.BUSY
        if result != "Success":
            return PairState.LOST
        if self._after is not None:
            after, self._after = self._after, None
            with self._torch.cuda.stream(self._stream):
                after()
                self._done = self._stream.record_event()
        return PairState.READY if self._done is None or self._done.query() else PairState.BUSY

    def send(self, octets: Bytes) -> None:
        count = len(octets)
        self._pinned[:count].copy_(self._torch.from_numpy(octets))
        with self._torch.cuda.stream(self._stream):
            self._device[:count].copy_(self._pinned[:count], non_blocking=True)
        self._communicator.send(self._device[:count], self._peer, stream=self._stream.cuda_stream)
        self._after = lambda: None

    def receive(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._communicator.recv(self._device[:num_bytes], self._peer, stream=self._stream.cuda_stream)
        self._after = lambda: self._pinned[:num_bytes].copy_(self._device[:num_bytes], non_blocking=True)

    def received(self) -> Bytes:
        octets: Bytes = self._pinned[: self._num_bytes].numpy()
        return octets

    def abort(self) -> None:
        self._communicator.abort()


def wait_ready(pair: Pair, is_wanted: Callable[[], bool], pause: Callable[[], None]) -> None:
    """Returns when the last message, or connecting, is done.

    Raises:
        Unavailable: the pair is lost, or nobody wants it any more.
    """
    while (state := pair.state()) is PairState.BUSY:
        if not is_wanted():
            raise Unavailable("nobody waits for this transfer any more")
        pause()
    if state is PairState.LOST:
        raise Unavailable("the peer's end of the NCCL pair is lost")

