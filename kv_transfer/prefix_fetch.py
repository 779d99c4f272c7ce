"""Fetches the cached beginning of a prompt from the worker that has it, before the rest is computed.

A prompt that has just got its blocks asks the holder to pin its own, gives its blocks to a lease on as many, pulls into
them, and has them back filled. Whatever goes wrong, and whatever is not done after `prefix_fetch_ms`, ends the fetch:
the prompt is computed then. Others go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kv_transfer.destination import HandoffDestination
from kv_transfer.journey import JourneyKey, PrefixSource
from kv_transfer.lease import PullResult
from kv_transfer.prefix_calls import HeldPrefix, WantedPrefix
from pd_engine.errors import DeadlineExceeded, PdRelayError
from pd_engine.service.ids import NewId

log = logging.getLogger(__name__)


class Prompt(Protocol):
    """A prompt of a worker, which has its blocks.

    Attributes:
        name: for logs.
        num_blocks: all that it has, and is to have again.
        block_ids: of those that it holds.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_ids(self) -> Sequence[int]: ...


PromptT = TypeVar("PromptT", bound=Prompt)
AnyPrompt = TypeVar("AnyPrompt", bound=Prompt, contravariant=True)


class LentBlocks(Protocol[AnyPrompt]):
    """The blocks of a worker's prompts, as far as a fetch moves them."""

    def give_up_fresh(self, prompt: AnyPrompt) -> None:
        """Of its blocks it keeps the leading ones with contents."""

    def release(self, prompt: AnyPrompt) -> None:
        """It holds none."""

    def fetched(self, prompt: AnyPrompt, owner: str, block_ids: Sequence[int], num_blocks: int) -> None:
        """These are its blocks, which `owner` hands over, the first `num_blocks` of them with their contents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixWish:
    """What a prompt would have of another worker.

    Attributes:
        holder: who is believed to have it.
        block_hashes: of the prompt's full blocks that may be shared, in order.
        token_ids: of the prompt.
        num_held_blocks: leading ones that are here.
    """

    holder: PrefixSource
    block_hashes: Sequence[bytes]
    token_ids: Sequence[int]
    cache_salt: str
    num_held_blocks: int

    @property
    def num_blocks(self) -> int:
        """Leading blocks that are wanted, those that are here among them."""
        return min(self.holder.num_blocks, len(self.block_hashes))


@dataclass(kw_only=True, slots=True, eq=False)
class _Fetch(Generic[PromptT]):
    """Attributes:
    key: of this fetch alone.
    deadline_s: on the event loop's clock.
    held: what is being pulled; None while the holder is asked.
    """

    prompt: PromptT
    wish: PrefixWish
    key: JourneyKey
    deadline_s: float
    timer: asyncio.TimerHandle
    held: HeldPrefix | None = None
    asking: asyncio.Task[None] | None = None


class PrefixFetcher(Generic[PromptT]):
    """All fetches of one worker. Belongs to the event loop's thread.

    Args:
        epoch: of this worker: it asks nothing of itself.
        fetch_ms: of one fetch at most; 0: nothing is fetched.
        on_end: a fetch has ended. The prompt has its blocks, or it holds none and is to be given blocks again; it is
            not called for a fetch that was stopped.

    `destination` is given after construction: it reports pulls of keys that are `own` here.
    """

    destination: HandoffDestination

    def __init__(
        self, blocks: LentBlocks[PromptT], *, epoch: str, fetch_ms: int, block_size: int,
        on_end: Callable[[PromptT], None], new_id: NewId,
    ) -> None:
        self._blocks = blocks
        self._epoch = epoch
        self._fetch_ms = fetch_ms
        self._block_size = block_size
        self._on_end = on_end
        self._new_id = new_id
        self._fetches: dict[JourneyKey, _Fetch[PromptT]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, prompt: PromptT, wish: PrefixWish) -> bool:
        """Of a prompt that has just got its blocks: True if `on_end` or `stop` follows."""
        if wish.num_held_blocks >= wish.num_blocks or not self._fetch_ms or wish.holder.epoch == self._epoch:
            return False
        loop = asyncio.get_running_loop()
        key = JourneyKey(self._new_id(), 1)
        fetch = self._fetches[key] = _Fetch(
            prompt=prompt, wish=wish, key=key, deadline_s=loop.time() + self._fetch_ms / 1000,
            timer=loop.call_later(self._fetch_ms / 1000, self._late, key),
        )
        fetch.asking = asyncio.create_task(self._ask(fetch), name=f"prefix for {prompt.name}")
        self._tasks.add(fetch.asking)
        fetch.asking.add_done_callback(self._tasks.discard)
        return True

    def stop(self, prompt: PromptT) -> None:
        """The prompt has ended: so has its fetch, if one is under way. It holds no blocks then, or its own."""
        for fetch in [fetch for fetch in self._fetches.values() if fetch.prompt is prompt]:
            self._forget(fetch)
            self._let_go(fetch)

    async def close(self) -> None:
        """After the last `stop`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What the destination reports

    def owns(self, key: JourneyKey) -> bool:
        """Whether it is the key of a fetch that is under way."""
        return key in self._fetches

    def on_pulled(self, key: JourneyKey, result: PullResult) -> None:
        fetch = self._fetches[key]
        assert fetch.held is not None, key
        self._forget(fetch)
        self._blocks.fetched(fetch.prompt, key.owner, result.block_ids, fetch.held.num_blocks)
        log.debug("%s: %d blocks from %s", fetch.prompt.name, fetch.held.num_blocks, fetch.wish.holder.address)
        self._on_end(fetch.prompt)

    def on_pull_failed(self, key: JourneyKey, error: PdRelayError, missing_blocks: tuple[int, ...]) -> None:
        if key in self._fetches:
            self._fail(self._fetches[key], error)

    # Inside

    async def _ask(self, fetch: _Fetch[PromptT]) -> None:
        wish = fetch.wish
        wanted = WantedPrefix(
            block_hashes=wish.block_hashes[: wish.num_blocks],
            token_ids=wish.token_ids[: wish.num_blocks * self._block_size],
            cache_salt=wish.cache_salt, num_held_blocks=wish.num_held_blocks,
        )
        try:
            held = await self.destination.hold(fetch.key, wish.holder, wanted, self._fetch_ms)
        except PdRelayError as error:
            self._fail(fetch, error)
            return
        if held is None:
            self._forget(fetch)
            self._on_end(fetch.prompt)
        else:
            self._pull(fetch, held)

    def _pull(self, fetch: _Fetch[PromptT], held: HeldPrefix) -> None:
        prompt = fetch.prompt
        left_s = fetch.deadline_s - asyncio.get_running_loop().time()
        fetch.held = held
        self._blocks.give_up_fresh(prompt)  # room for the lease
        lease = self.destination.reserve(
            fetch.key, num_tokens=held.num_blocks * self._block_size, num_blocks=prompt.num_blocks,
            held_block_ids=prompt.block_ids, lease_ms=max(1, round(left_s * 1000)), is_prefix=True,
        )
        self._blocks.release(prompt)
        self.destination.pull(fetch.key, lease.lease_id, held.source)

    def _late(self, key: JourneyKey) -> None:
        self._fail(self._fetches[key], DeadlineExceeded(f"it took longer than {self._fetch_ms} ms"))

    def _fail(self, fetch: _Fetch[PromptT], error: PdRelayError) -> None:
        holder = fetch.wish.holder
        log.info("%s: no prefix from %s, it is computed: %s", fetch.prompt.name, holder.address, error.message)
        self._forget(fetch)
        self._let_go(fetch)
        self._on_end(fetch.prompt)

    def _forget(self, fetch: _Fetch[PromptT]) -> None:
        fetch.timer.cancel()
        del self._fetches[fetch.key]

    def _let_go(self, fetch: _Fetch[PromptT]) -> None:
        """Of what the holder pins, and of the lease, whose end the holder is told by the destination."""
        if fetch.held is not None:
            self.destination.release(fetch.key.journey_id, fetch.key.attempt)
            return
        assert fetch.asking is not None
        if fetch.asking is not asyncio.current_task():
            fetch.asking.cancel()
        self.destination.let_go(fetch.key, fetch.wish.holder.address, fetch.wish.holder.epoch)
