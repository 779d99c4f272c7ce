"""The holder's side of a prefix fetch: cached blocks of this worker, pinned and handed over to another one.

What is pinned is a handoff like any other (`source`), whose blocks are all final from the beginning; only its deadline
is never renewed, and there are bounds for how many there are at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.journey import JourneyKey, SourceInfo
from kv_transfer.manifest import Closing
from kv_transfer.source import OnEnd
from kv_transfer.source_state import SourceEnd
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.layout import CacheLayout, ComponentKind
from pd_engine.cache.prefix import PrefixCache
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import AlreadyExists, InvalidArgument
from pd_engine.hashing import HASH_BYTES
from pd_engine.service.requests import parse_lease_ms, parse_salt
from pd_engine.settings import TransferSettings

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldSpec:
    """A checked `Hold` call.

    Attributes:
        key: of this fetch alone.
        block_hashes: of the leading blocks that are wanted, in order.
        token_ids: of these blocks, all of them full.
        num_held_blocks: leading ones that the caller has.
    """

    key: JourneyKey
    block_hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    cache_salt: str
    num_held_blocks: int
    lease_ms: int


def parse_hold(request: pb.HoldRequest, *, block_size: int, max_blocks: int) -> HoldSpec:
    """Raises:
    InvalidArgument: a field is outside its range.
    """
    num_blocks = len(request.block_hashes)
    if not 1 <= num_blocks <= max_blocks:
        raise InvalidArgument(f"block_hashes must hold 1 to {max_blocks} hashes, got {num_blocks}")
    for index, value in enumerate(request.block_hashes):
        if len(value) != HASH_BYTES:
            raise InvalidArgument(f"block_hashes[{index}] must have {HASH_BYTES} bytes, got {len(value)}")
    if len(request.token_ids) != num_blocks * block_size:
        raise InvalidArgument(
            f"token_ids must be those of {num_blocks} blocks of {block_size} tokens, got {len(request.token_ids)}"
        )
    if request.num_held_blocks >= num_blocks:
        raise InvalidArgument(f"num_held_blocks must be below {num_blocks}, got {request.num_held_blocks}")
    return HoldSpec(
        key=JourneyKey.parse(request.journey.journey_id, request.journey.attempt),
        block_hashes=tuple(request.block_hashes), token_ids=tuple(request.token_ids),
        cache_salt=parse_salt(request.cache_salt), num_held_blocks=request.num_held_blocks,
        lease_ms=parse_lease_ms(request.lease_ms),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """What was found.

    Attributes:
        num_blocks: leading blocks that are here and may be pinned.
        token: capability for the fetch; empty if the caller has that many itself: then nothing is pinned.
    """

    num_blocks: int
    token: str


class PinningSource(Protocol):
    """What a holder needs of a `HandoffSource`."""

    @property
    def layout(self) -> CacheLayout: ...

    def has_journey(self, journey_id: str) -> bool: ...

    def begin(
        self, key: JourneyKey, *, block_ids: Sequence[int], num_tokens: int, num_held_blocks: int, lease_ms: int,
        on_end: OnEnd, is_renewable: bool,
    ) -> SourceInfo: ...

    def publish(self, key: JourneyKey, component: int, num_valid_tokens: int) -> None: ...

    def finish(self, key: JourneyKey, closing: Closing) -> None: ...


class PrefixHolder:
    """All prefixes that this worker holds for others. Belongs to the event loop's thread.

    Args:
        cache: None: nothing is ever found.
        with_mtp: the layout has MTP slots: only blocks where these are final as well are handed over.
        has_room: whether this worker can do without blocks; where its own sequences wait for some, nothing new is
            pinned.

    Attributes:
        draining: nothing new is pinned.
    """

    def __init__(
        self, source: PinningSource, pool: BlockPool, cache: PrefixCache | None, *, with_mtp: bool,
        settings: TransferSettings, has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        layout = source.layout
        can_share = all(component.kind is ComponentKind.PAGED for component in layout.components)
        self.draining = False
        self._source = source
        self._pool = pool
        self._cache = cache if can_share else None
        self._with_mtp = with_mtp
        self._has_room = has_room
        self._max_holds = settings.max_holds
        self._max_blocks = settings.max_hold_mib * MIB // layout.block_bytes
        self._max_lease_ms = settings.lease_ms
        self._holds: dict[JourneyKey, tuple[HoldSpec, Hold, tuple[int, ...]]] = {}  # pinned: (asked, answer, blocks)

    @property
    def num_pinned_blocks(self) -> int:
        """Each counted as often as it is pinned here."""
        return sum(len(blocks) for _, _, blocks in self._holds.values())

    def answer(self, request: pb.HoldRequest, epoch: str) -> pb.HoldReply:
        """`hold`, for a call that has just arrived in this epoch.

        Raises:
            InvalidArgument: a field is outside its range.
        """
        block_size = self._source.layout.block_size
        hold = self.hold(parse_hold(request, block_size=block_size, max_blocks=self._pool.num_blocks))
        return pb.HoldReply(token=hold.token, epoch=epoch, num_blocks=hold.num_blocks)

    def hold(self, spec: HoldSpec) -> Hold:
        """Pins what is here of the prefix, as far as the bounds allow, and announces it. The same call again is
        answered alike.

        Raises:
            Gone: it was released, or has ended.
            AlreadyExists: the journey is another one's, or the same call with another payload.
        """
        known = self._holds.get(spec.key)
        if known is not None and known[0] == spec:
            return known[1]
        if known is not None or self._source.has_journey(spec.key.journey_id):
            raise AlreadyExists(f"{spec.key} is under way with another payload")
        blocks = self._found(spec)
        if len(blocks) <= spec.num_held_blocks:
            return Hold(num_blocks=len(blocks), token="")
        return self._pin(spec, blocks)

    def _found(self, spec: HoldSpec) -> Sequence[int]:
        if self._cache is None or self.draining or not self._has_room() or len(self._holds) >= self._max_holds:
            return ()
        chain = self._cache.chain(spec.token_ids, num_prompt_tokens=len(spec.token_ids), salt=spec.cache_salt)
        if tuple(chain.hashes) != spec.block_hashes:  # of another model, salt or form: nothing to share
            return ()
        found = self._cache.match(chain, with_mtp=self._with_mtp)
        return found[: max(0, self._max_blocks - self.num_pinned_blocks)]

    def _pin(self, spec: HoldSpec, blocks: Sequence[int]) -> Hold:
        key, num_tokens = spec.key, len(blocks) * self._source.layout.block_size
        self._pool.hold(blocks, key.owner)
        try:
            info = self._source.begin(
                key, block_ids=blocks, num_tokens=num_tokens, num_held_blocks=spec.num_held_blocks,
                lease_ms=min(spec.lease_ms, self._max_lease_ms), on_end=self._on_end, is_renewable=False,
            )
        except BaseException:
            self._pool.release(blocks, key.owner)
            raise
        hold = Hold(num_blocks=len(blocks), token=info.token)
        self._holds[key] = (spec, hold, tuple(blocks))
        for component in range(len(self._source.layout.components)):
            self._source.publish(key, component, num_tokens)
        self._source.finish(key, Closing(first_token_id=None, num_prompt_tokens=num_tokens))
        return hold

    def _on_end(self, key: JourneyKey, reason: SourceEnd) -> None:
        _, _, blocks = self._holds.pop(key)
        self._pool.release(blocks, key.owner)
