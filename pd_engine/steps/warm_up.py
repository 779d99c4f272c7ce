"""One request that nobody made: kernels that are compiled at their first launch are compiled before anybody waits."""

from __future__ import annotations

from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import Sequence
from pd_engine.steps.decode import try_decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, try_sample_first

NUM_PROMPT_TOKENS = 1_100  # more than attention on a GPU takes in one go
NUM_TOKENS = 4


def warm_up(engine: Engine, chunk_tokens: int) -> None:
    """A prompt in chunks of this size, as long as there is room for, then tokens with drafts. Leaves no block taken."""
    room = min(engine.max_context_length, engine.pool.num_free * engine.layout.block_size)
    length = min(NUM_PROMPT_TOKENS, room - NUM_TOKENS)
    if length < 1:
        return
    sequence = Sequence(
        name="warm up", token_ids=[0] * length, num_prompt_tokens=length, ending_ids=frozenset(),
        params=SamplingParams(
            temperature=1.0, top_p=0.9, top_k=8, min_p=0.01, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
        ),
        speculate=1 if engine.has_mtp else 0,
        block_ids=engine.pool.allocate(engine.layout.num_blocks_for(length + NUM_TOKENS), "warm up"),
    )
    try:
        while sequence.num_computed < length:
            count = min(chunk_tokens, length - sequence.num_computed)
            prefill_step(engine, [Chunk(sequence=sequence, num_tokens=count)])
        [outcome] = try_sample_first(engine, [sequence])
        while not isinstance(outcome, Internal) and sequence.num_generated < NUM_TOKENS:
            [step] = try_decode_step(engine, [sequence])
            if isinstance(step, Internal):
                break
    finally:
        engine.pool.release(sequence.block_ids, sequence.name)
