"""Prefixes in a `World`: what a source has computed stays in its cache, is pinned for destinations, and pulled by them.

The holder, the cache and the books are the production classes; what their shells do around them is done here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.holds import HoldSpec
from kv_transfer.journey import JourneyKey, SourceInfo
from kv_transfer.manifest import Closing
from kv_transfer.publisher import Progress
from kv_transfer.source import OnEnd
from kv_transfer.source_state import MARGIN_S, SourceHandoff
from pd_engine.cache.layout import CacheLayout
from pd_engine.cache.prefix import PrefixCache
from pd_engine.errors import Gone, ResourceExhausted
from pd_engine.settings import TransferSettings
from support.handoff_prompt import PAGED, Prompt
from support.handoff_sides import Destination, Source

if TYPE_CHECKING:
    from support.handoff_world import World

FINGERPRINT = "ab"
HOLD_MS = 1_500
MAX_HOLDS = 3


@dataclass(frozen=True, kw_only=True)
class Held:
    """An answered `Hold`: the destination has not begun to pull yet."""

    key: JourneyKey
    source: Source
    destination: Destination
    info: SourceInfo
    held_block_ids: Sequence[int]
    num_blocks: int
    deadline_s: float


class _Pins:
    """A source's shell, as its holder sees it."""

    def __init__(self, world: World, source: Source) -> None:
        self._world = world
        self._source = source
        self._progress: dict[JourneyKey, Progress] = {}

    @property
    def layout(self) -> CacheLayout:
        return self._world.layout

    def has_journey(self, journey_id: str) -> bool:
        return self._source.book.has_journey(journey_id)

    def begin(
        self, key: JourneyKey, *, block_ids: Sequence[int], num_tokens: int, num_held_blocks: int, lease_ms: int,
        on_end: OnEnd, is_renewable: bool,
    ) -> SourceInfo:
        source, world = self._source, self._world
        deadline_s = world.now_s + lease_ms / 1000 + MARGIN_S
        assert not is_renewable
        handoff = SourceHandoff(
            key=key, token=secrets.token_hex(16), block_ids=tuple(block_ids),
            generations=tuple(int(source.arena.generations[block]) for block in block_ids), num_tokens=num_tokens,
            num_held_blocks=num_held_blocks, deadline_s=deadline_s, last_deadline_s=deadline_s,
        )
        source.book.begin(handoff, world.now_s)
        source.blocks[key], source.holds[key] = list(block_ids), on_end
        self._progress[key] = Progress(
            source.arena, handoff.block_ids, handoff.generations, num_tokens, num_held_blocks
        )
        world.by_token[handoff.token] = source
        return SourceInfo(address=str(world.sources.index(source)), epoch=source.epoch, token=handoff.token)

    def publish(self, key: JourneyKey, component: int, num_valid_tokens: int) -> None:
        records = self._progress[key].advance(component, num_valid_tokens, self._world.parts.checksums)
        self._source.book.publish(key, records)

    def finish(self, key: JourneyKey, closing: Closing) -> None:
        assert self._progress.pop(key).is_complete
        self._source.book.close(key, closing)


def give_prefixes(world: World, source: Source) -> None:
    """A prefix cache, and who serves it to others."""
    source.cache = PrefixCache(source.pool, fingerprint=FINGERPRINT, block_size=world.layout.block_size)
    settings = TransferSettings(lease_ms=HOLD_MS, max_holds=MAX_HOLDS)
    pins = _Pins(world, source)
    source.holder = world.parts.holder(pins, source.pool, source.cache, with_mtp=True, settings=settings)


def keep(world: World, source: Source, prompt: Prompt) -> None:
    """A request with that prompt has run there."""
    name = world.new_name()
    try:
        blocks = source.pool.allocate(world.layout.num_blocks_for(prompt.num_tokens), name)
    except ResourceExhausted:
        return
    for component in range(len(world.layout.components)):
        prompt.write(source.arena, tuple(blocks), component, 0, prompt.num_tokens)
    chain = source.cache.chain(prompt.token_ids, num_prompt_tokens=prompt.num_tokens)
    source.cache.begin(chain, blocks)
    source.cache.store(chain, blocks, num_final=prompt.num_tokens, num_final_mtp=prompt.num_tokens)
    source.pool.release(blocks, name)
    world.kept.append((source, prompt))


def hold(world: World, source: Source, prompt: Prompt, destination: Destination) -> JourneyKey | None:
    """The destination asks for the prompt's full blocks beyond those of a running sequence with the same one."""
    block_size = world.layout.block_size
    num_blocks = prompt.num_tokens // block_size
    own = world.held_of(destination, prompt)
    if source not in world.sources or num_blocks <= len(own):
        return None
    key = JourneyKey(world.new_journey(prompt.num_tokens), 1)
    before = source.holder.num_pinned_blocks
    chain = source.cache.chain(prompt.token_ids, num_prompt_tokens=prompt.num_tokens)
    spec = HoldSpec(
        key=key, block_hashes=tuple(chain.hashes), token_ids=tuple(prompt.token_ids[: num_blocks * block_size]),
        cache_salt="", num_held_blocks=len(own), lease_ms=HOLD_MS,
    )
    answer = source.holder.hold(spec)
    assert source.holder.hold(spec) == answer, f"{key}: the same call was answered differently"
    if not answer.token:
        assert source.holder.num_pinned_blocks == before
        return None
    assert world.layout is PAGED, f"{key}: blocks that cannot be shared are handed over"
    assert len(own) < answer.num_blocks <= num_blocks
    world.prompts[key.journey_id] = prompt.beginning(answer.num_blocks * block_size)
    info = SourceInfo(address=str(world.sources.index(source)), epoch=source.epoch, token=answer.token)
    world.held_until_s[key] = world.now_s + HOLD_MS / 1000
    world.held.append(Held(
        key=key, source=source, destination=destination, info=info, held_block_ids=own,
        num_blocks=answer.num_blocks, deadline_s=world.now_s + HOLD_MS / 1000,
    ))
    return key


def pull(world: World, held: Held) -> None:
    """It has the answer, and time left: it pulls."""
    world.held.remove(held)
    destination, left_s = held.destination, held.deadline_s - world.now_s
    own = world.held_of(destination, world.prompts[held.key.journey_id])[: len(held.held_block_ids)]
    if destination not in world.destinations or left_s <= 0 or tuple(own) != tuple(held.held_block_ids):
        return
    try:
        lease = destination.book.reserve(
            held.key, lease_id=secrets.token_hex(16), lease_ms=round(left_s * 1000),
            num_tokens=held.num_blocks * world.layout.block_size, num_blocks=held.num_blocks,
            held_block_ids=own, now_s=world.now_s, is_prefix=True,
        )
    except (Gone, ResourceExhausted):
        return
    finally:
        world.settle(destination)
    world.leases[held.key] = (destination, lease)
    world.infos[held.key] = (held.source, held.info)
    world.pull(held.key)
