"""What a worker has of a handoff that it is the destination of: first a lease, then what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing
from pd_engine.errors import PdRelayError


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A deadline-bound right to blocks of this worker.

    Attributes:
        lease_id: 32 hexadecimal digits.
        lease_ms: how long it lives without renewal.
        num_held_blocks: leading blocks that need not be sent: those given to `reserve`, or those that an earlier
            attempt has verified.
        block_ids: all blocks of the sequence in order, the held ones first.
    """

    lease_id: str
    lease_ms: int
    num_held_blocks: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PullResult:
    """A handoff that is complete and verified.

    Attributes:
        block_ids: now the caller's, held in the pool under `key.owner`; empty if the first token ended the request
            (`closing.finish_reason` is set): then the lease has been released.
        num_bytes: valid slots not already held x bytes a token.
        num_hidden_bytes: of these, verified before the source said that the prompt was computed.
        pull_s, exposed_s: from the pull's beginning, and from when the source said so, until everything was here.
        checksums: uint64 [components, blocks of the prompt], each over the valid slots; 0 for held blocks.
    """

    block_ids: tuple[int, ...]
    closing: Closing
    num_bytes: int
    num_hidden_bytes: int
    pull_s: float
    exposed_s: float
    transport: str
    checksums: npt.NDArray[np.uint64]


OnComplete = Callable[[JourneyKey, PullResult], None]
OnFailed = Callable[[JourneyKey, PdRelayError, tuple[int, ...]], None]
OnExpired = Callable[[JourneyKey], None]
