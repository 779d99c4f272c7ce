"""How many placements a core makes a second, and what the index of cached blocks weighs: no process, no network."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import psutil

from pd_engine.errors import InvalidArgument
from pd_engine.hashing import HASH_BYTES, block_hashes
from pd_ops.bench.measured_process import Document
from pd_router.placement import Placement, place
from pd_router.pools import PlacementRequest, Snapshot, WorkerView
from pd_router.prefix_index import CacheEvents, PrefixIndex

BLOCK_SIZE = 16
NUM_OUTPUT_TOKENS = 200
NUM_PROMPTS = 500  # different ones, taken in turns
SHARED_EVERY = 4  # every so many chains of blocks are at two workers
FINGERPRINT = "ab" * 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSpeed:
    """Times are CPU time of one core, medians over rounds.

    Attributes:
        num_entries: blocks at workers, a block at two workers twice.
        index_bytes: that the process grew by while the index was filled.
        placements_per_s: look-up, choice and the two changed workers, for prompts whose hashes are known.
        hash_us: to hash a prompt's blocks, which a router does once a request.
        look_up_us, choose_us: the two parts of a placement.
    """

    num_workers: int
    num_blocks: int
    num_entries: int
    num_prompt_blocks: int
    index_bytes: int
    fill_us_per_entry: float
    placements_per_s: float
    hash_us: float
    look_up_us: float
    choose_us: float

    def to_json(self) -> Document:
        return asdict(self)


class _World:
    """Pools, an index and prompts of which the first half is known to somebody."""

    def __init__(self, *, num_workers: int, num_blocks: int, num_prompt_blocks: int, seed: int) -> None:
        self._random = random.Random(seed)
        self.num_prompt_blocks = num_prompt_blocks
        self.index = PrefixIndex(max_entries=2 * num_blocks + num_prompt_blocks)
        names = [f"{'prefill' if i % 2 == 0 else 'decode'}-{i // 2}" for i in range(num_workers)]
        memory = psutil.Process().memory_info
        chains = self._chains(num_blocks, names)
        bytes_before, begin_s = memory().rss, time.process_time()
        for chain, holders in chains:
            for name in holders:
                self._store(name, chain)
        self.fill_us_per_entry = 1e6 * (time.process_time() - begin_s) / self.index.num_entries
        self.index_bytes = memory().rss - bytes_before
        self.prefill = [self._view(name) for name in names if name.startswith("prefill")]
        self.decode = [self._view(name) for name in names if name.startswith("decode")]
        self._place_of = {view.worker_id: at for pool in (self.prefill, self.decode) for at, view in enumerate(pool)}
        self.requests = [self._request(chains[self._random.randrange(len(chains))][0]) for _ in range(NUM_PROMPTS)]

    def look_up(self, request: PlacementRequest) -> None:
        self.index.held(request.block_hashes)

    def place(self, request: PlacementRequest) -> None:
        """One placement as a router makes it, with the damping that changes what it sees of the two chosen."""
        held = self.index.held(request.block_hashes)
        snapshot = Snapshot(prefill=tuple(self.prefill), decode=tuple(self.decode), held=held)
        placement = place(request, snapshot)
        assert isinstance(placement, Placement), placement
        for pool, worker_id in ((self.prefill, placement.prefill_worker), (self.decode, placement.decode_worker)):
            assert worker_id is not None, placement
            pool[self._place_of[worker_id]] = self._view(worker_id)

    def _chains(self, num_blocks: int, names: list[str]) -> list[tuple[list[bytes], list[str]]]:
        """Each a prompt's blocks and who holds them."""
        chains = []
        for number in range(-(-num_blocks // self.num_prompt_blocks)):
            count = min(self.num_prompt_blocks, num_blocks - number * self.num_prompt_blocks)
            chain = [self._random.randbytes(HASH_BYTES) for _ in range(count)]
            chains.append((chain, self._random.sample(names, 2 if number % SHARED_EVERY == 0 else 1)))
        return chains

    def _store(self, name: str, chain: list[bytes]) -> None:
        """As it comes from a stream: every message has hashes of its own."""
        sequence = self.index.resume(name, "epoch")
        self.index.apply(name, CacheEvents(
            epoch="epoch", previous_sequence=sequence, sequence=sequence + len(chain), is_snapshot=sequence == 0,
            stored=[bytes(bytearray(block_hash)) for block_hash in chain],
        ))

    def _view(self, name: str) -> WorkerView:
        rolls = self._random.random
        return WorkerView(
            worker_id=name, ready=True, num_queued_tokens=int(20_000 * rolls()), num_sequences=int(60 * rolls()),
            num_blocks_free=10_000 + int(10_000 * rolls()), num_blocks_total=20_000,
            prefill_ms_per_token=0.05 + 0.01 * rolls(), next_itl_ms=20 + 10 * rolls(),
        )

    def _request(self, chain: list[bytes]) -> PlacementRequest:
        num_known = self.num_prompt_blocks // 2
        unknown = [self._random.randbytes(HASH_BYTES) for _ in range(self.num_prompt_blocks - num_known)]
        num_tokens = self.num_prompt_blocks * BLOCK_SIZE
        return PlacementRequest(
            num_tokens=num_tokens, num_prefill_blocks=self.num_prompt_blocks,
            num_decode_blocks=self.num_prompt_blocks + -(-NUM_OUTPUT_TOKENS // BLOCK_SIZE),
            num_output_tokens=NUM_OUTPUT_TOKENS, block_size=BLOCK_SIZE,
            block_hashes=(*chain[:num_known], *unknown),
        )


def measure_placements(
    *, num_workers: int, num_blocks: int, num_prompt_blocks: int, rounds: int, seed: int = 0
) -> PlacementSpeed:
    """Raises:
    InvalidArgument: fewer than four workers, or fewer blocks than a prompt has.
    """
    if num_workers < 4:
        raise InvalidArgument(f"--workers must be at least 4, two of each pool, got {num_workers}")
    if num_blocks < num_prompt_blocks:
        raise InvalidArgument(f"--blocks must be at least --prompt-blocks ({num_prompt_blocks}), got {num_blocks}")
    world = _World(
        num_workers=num_workers, num_blocks=num_blocks, num_prompt_blocks=num_prompt_blocks, seed=seed
    )
    unhashed = [replace(request, block_hashes=()) for request in world.requests]
    prompt = list(range(num_prompt_blocks * BLOCK_SIZE))
    place_us = _median_us(world.place, world.requests, rounds)
    return PlacementSpeed(
        num_workers=num_workers,
        num_blocks=world.index.num_blocks,
        num_entries=world.index.num_entries,
        num_prompt_blocks=num_prompt_blocks,
        index_bytes=world.index_bytes,
        fill_us_per_entry=world.fill_us_per_entry,
        placements_per_s=1e6 / place_us,
        hash_us=_median_us(lambda _: block_hashes(prompt, fingerprint=FINGERPRINT), world.requests[:20], rounds),
        look_up_us=_median_us(world.look_up, world.requests, rounds),
        choose_us=_median_us(world.place, unhashed, rounds),
    )


def _median_us(
    work: Callable[[PlacementRequest], object], requests: list[PlacementRequest], rounds: int
) -> float:
    """CPU time a request, the median round."""
    results = []
    for _ in range(rounds):
        begin_s = time.process_time()
        for request in requests:
            work(request)
        results.append(1e6 * (time.process_time() - begin_s) / len(requests))
    return sorted(results)[rounds // 2]
