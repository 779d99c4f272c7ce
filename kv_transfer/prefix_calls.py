"""What the fetcher of a prefix says to its holder, apart from the pull itself, and what it is told of the holder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from kv_transfer.journey import JourneyKey, PrefixSource, SourceInfo, is_hex_id
from kv_transfer.peers import Peers
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import Gone, InvalidArgument
from pd_engine.service.client import typed_error
from pd_engine.service.requests import parse_address, parse_hex_id

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedPrefix:
    """Leading full blocks of a prompt, those that are here included.

    Attributes:
        block_hashes: in order.
        token_ids: of all these blocks.
        num_held_blocks: leading ones that are here.
    """

    block_hashes: Sequence[bytes]
    token_ids: Sequence[int]
    cache_salt: str
    num_held_blocks: int


def parse_prefix_holder(holder: pb.PrefixHolder, *, max_blocks: int) -> PrefixSource:
    """Raises:
    InvalidArgument: a field is outside its range.
    """
    if not 1 <= holder.num_blocks <= max_blocks:
        raise InvalidArgument(f"prefix_holder.num_blocks must be in [1, {max_blocks}], got {holder.num_blocks}")
    return PrefixSource(
        address=parse_address("prefix_holder.address", holder.address),
        epoch=parse_hex_id("prefix_holder.epoch", holder.epoch), num_blocks=holder.num_blocks,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPrefix:
    """`num_blocks` leading blocks are pinned there, to be pulled from `source`."""

    source: SourceInfo
    num_blocks: int


class PrefixCalls:
    """Of one worker, to all holders."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def hold(
        self, key: JourneyKey, holder: PrefixSource, wanted: WantedPrefix, lease_ms: int
    ) -> HeldPrefix | None:
        """Asks the holder to pin what it has; None: no more than what is here. It may take `lease_ms`, from whose
        beginning the pins last as long.

        Raises:
            Gone: it is another life of the holder.
            InvalidArgument: it answers what cannot be.
            PdRelayError: it refuses, or does not answer in time.
        """
        request = pb.HoldRequest(
            journey=_ref(key), block_hashes=wanted.block_hashes, token_ids=wanted.token_ids,
            cache_salt=wanted.cache_salt, num_held_blocks=wanted.num_held_blocks, lease_ms=lease_ms,
        )
        try:
            reply = await self._peers.stub(holder.address, holder.epoch).Hold(request, timeout=lease_ms / 1000)
        except grpc.aio.AioRpcError as error:
            raise typed_error(error) from None
        if reply.epoch != holder.epoch:
            raise Gone
        if not reply.token:
            return None
        if not is_hex_id(reply.token):
            raise InvalidArgument(f"hold: token must be 32 hexadecimal digits, got {reply.token[:64]!r}")
        if not wanted.num_held_blocks < reply.num_blocks <= len(wanted.block_hashes):
            raise InvalidArgument(
                f"hold: num_blocks must be in ({wanted.num_held_blocks}, {len(wanted.block_hashes)}], got "
                f"{reply.num_blocks}"
            )
        source = SourceInfo(address=holder.address, epoch=reply.epoch, token=reply.token)
        return HeldPrefix(source=source, num_blocks=reply.num_blocks)

    async def let_go(self, key: JourneyKey, address: str, epoch: str, timeout_s: float) -> None:
        """Ends the pins, and whatever call for them is still on its way. If the holder cannot be told, they expire."""
        request = pb.ReleaseRequest(journeys=[_ref(key)], reason="the fetch has ended")
        try:
            await self._peers.worker_stub(address, epoch).Release(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.info("release of %s: %s", key, typed_error(error).message)


def _ref(key: JourneyKey) -> pb.JourneyRef:
    return pb.JourneyRef(journey_id=key.journey_id, attempt=key.attempt)
