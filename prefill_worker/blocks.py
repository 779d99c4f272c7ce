"""Which blocks a prompt gets: those of earlier prompts that begin with the same tokens, and fresh ones."""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.prefix_fetch import PrefixWish
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.prefix import PrefixCache
from pd_engine.errors import ResourceExhausted
from pd_engine.priority import Turn
from pd_engine.sequence import Sequence
from pd_engine.steps.state import take_cached
from prefill_worker.job import Job, PrefillSpec


class PromptBlocks:
    """The pool and the prefix cache of a prefill worker, as its jobs use them. Belongs to the event loop's thread.

    Args:
        cache: None: every prompt is computed whole.
        with_mtp: the engine has an MTP layer: blocks are shared only if its slots are final as well.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache | None, *, block_size: int, with_mtp: bool) -> None:
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._with_mtp = with_mtp

    def new_job(self, spec: PrefillSpec, turn: Turn) -> Job:
        """A job without blocks."""
        chain = None
        if self._cache is not None:
            chain = self._cache.chain(
                spec.choice.token_ids, num_prompt_tokens=spec.choice.num_prompt_tokens, salt=spec.cache_salt
            )
        num_blocks = -(-spec.num_tokens // self._block_size)
        return Job(spec=spec, num_blocks=num_blocks, turn=turn, chain=chain)

    def num_missing(self, job: Job) -> int:
        """Blocks that must be free for it: shared ones that somebody holds anyway take no room."""
        return job.num_blocks - sum(self._pool.is_held(block) for block in self._cached(job))

    def take(self, job: Job) -> None:
        """Gives the job its blocks.

        Raises:
            ResourceExhausted: fewer than `num_missing` are free; it holds none then.
        """
        cached = self._cached(job)
        self._pool.hold(cached, job.name)
        try:
            fresh = self._pool.allocate(job.num_blocks - len(cached), job.name)
        except ResourceExhausted:
            self._pool.release(cached, job.name)
            raise
        job.block_ids = [*cached, *fresh]
        job.num_cached_blocks = len(cached)
        if self._cache is not None and job.chain is not None:
            self._cache.begin(job.chain, job.block_ids)

    def wish(self, job: Job) -> PrefixWish | None:
        """What a job that has its blocks may fetch; None: nothing, or nothing more."""
        spec = job.spec
        if spec.prefix_holder is None or job.chain is None or spec.bypass_prefix_cache or job.tried_to_fetch:
            return None
        return PrefixWish(
            holder=spec.prefix_holder, block_hashes=job.chain.hashes, token_ids=spec.choice.token_ids,
            cache_salt=spec.cache_salt, num_held_blocks=job.num_cached_blocks,
        )

    def give_up_fresh(self, job: Job) -> None:
        """Of its blocks it keeps the cached ones only."""
        self._pool.release(job.block_ids[job.num_cached_blocks :], job.name)
        del job.block_ids[job.num_cached_blocks :]

    def fetched(self, job: Job, owner: str, block_ids: Iterable[int], num_blocks: int) -> None:
        """These are its blocks, which `owner` hands over, the first `num_blocks` of them with their contents: whoever
        comes now finds those."""
        assert self._cache is not None and job.chain is not None, job.name
        job.block_ids = list(block_ids)
        job.num_cached_blocks = num_blocks
        self._pool.transfer(job.block_ids, owner, job.name)
        job.chain.num_stored = job.chain.num_stored_mtp = 0
        self._cache.begin(job.chain, job.block_ids)
        num_final = num_blocks * self._block_size
        self._cache.store(
            job.chain, job.block_ids, num_final=num_final, num_final_mtp=num_final if self._with_mtp else 0
        )

    def start(self, job: Job) -> Sequence:
        """The sequence to compute, from the first token on that is not cached."""
        choice, num_cached = job.spec.choice, job.num_cached_blocks * self._block_size
        sequence = Sequence(
            name=job.name,
            token_ids=list(choice.token_ids),
            num_prompt_tokens=choice.num_prompt_tokens,
            params=choice.params,
            ending_ids=choice.ending_ids,
            speculate=choice.speculate,
            block_ids=list(job.block_ids),
        )
        take_cached(sequence, num_cached=num_cached, num_cached_mtp=num_cached if self._with_mtp else 0)
        job.num_computed = sequence.num_computed
        return sequence

    def computed(self, job: Job, num_computed: int) -> None:
        """So many leading tokens of it are done: whoever comes now finds their full blocks."""
        job.num_computed = num_computed
        if self._cache is not None and job.chain is not None and job.block_ids:
            self._cache.store(
                job.chain, job.block_ids, num_final=num_computed, num_final_mtp=num_computed if self._with_mtp else 0
            )

    def num_cached_tokens(self, job: Job) -> int:
        """Prompt tokens that were cached, here or at the worker that they were fetched from. At most the last one of
        these was computed again, for its state (`take_cached`); all other prompt tokens were computed."""
        return min(job.num_cached_blocks * self._block_size, job.spec.choice.num_prompt_tokens)

    def release(self, job: Job) -> None:
        """Nobody writes or reads them any more."""
        self._pool.release(job.block_ids, job.name)
        job.block_ids = []

    def check_integrity(self) -> None:
        (self._cache or self._pool).check_integrity()

    def _cached(self, job: Job) -> list[int]:
        if self._cache is None or job.chain is None or job.spec.bypass_prefix_cache:
            return []
        return self._cache.match(job.chain, with_mtp=self._with_mtp)
