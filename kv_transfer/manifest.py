"""What a manifest says. Types only: `manifest_wire` packs, unpacks and checks them.

A manifest is a stream of parts: one `Opening`, then `Pieces` as they are computed, then one `Closing` or `Failed`.
Later announcements of a piece supersede earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import ErrorCode
from pd_engine.sequence import FinishReason, TokenLogprobs

PIECE_RECORD = np.dtype(
    [
        ("component", "<u2"),   # index into the layout's components
        ("block", "<u4"),       # logical: the how-manieth block of the sequence
        ("block_id", "<u4"),    # in the source's arena
        ("num_valid", "<u2"),   # leading slots that are final
        ("generation", "<u8"),  # of the block, when it was pinned
        ("checksum", "<u8"),    # over the bytes of the valid slots; 0 when checksums are off
    ]
)
"""One announced piece, packed: `Pieces.records` is a one-dimensional array of these."""

Records = npt.NDArray[np.void]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a puller says of itself when it asks for a manifest: compared before anything else happens.

    Attributes:
        lease_ms: how long the puller counts on the source's pins from the time of asking, without another word.
    """

    worker_id: str
    fingerprint: str
    layout: CacheLayout
    host_id: str
    transports: tuple[str, ...]
    checksums: bool
    lease_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a source says of itself and of one handoff.

    Attributes:
        num_tokens: prompt tokens P: slots 0..P-1 of every component are handed over.
        num_held_blocks: leading blocks that the destination has: never announced.
        num_arena_blocks: blocks in the source's arena; every announced `block_id` is below it.
        lease_ms: how long the source keeps its pins without renewal.
        transports: how to connect, by transport name; each value is checked by that transport.
    """

    worker_id: str
    epoch: str
    fingerprint: str
    layout: CacheLayout
    host_id: str
    num_tokens: int
    num_held_blocks: int
    num_arena_blocks: int
    lease_ms: int
    checksums: bool
    transports: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces that are final up to their number of valid slots."""

    records: Records


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenState:
    """The row that the MTP layer continues from: h of position P-1 after the final norm.

    Attributes:
        data: `width` numbers in the engine's dtype, little-endian.
        dtype: a key of `pd_engine.cache.layout.DTYPE_BYTES`.
        width: the model's hidden size D.
    """

    data: bytes
    dtype: str
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """The end of a manifest: the prompt is computed and its first token sampled, or all of a prefix is announced.

    Attributes:
        first_token_id: None of a prefix, for which nothing was sampled.
        finish_reason: set if the first token ends the request: then nobody needs the blocks.
        stop_reason: the stop string or stop token's id in decimal; empty otherwise.
        hidden: None without an MTP layer.
    """

    first_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    hidden: HiddenState | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The end of a manifest that never closes: the source gave up."""

    code: ErrorCode
    message: str = field(default="")


Part = Opening | Pieces | Closing | Failed
