"""The sequences that `bench layers` decodes and reads, on an engine without the MTP layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.model.mla import StepRows
from pd_engine.sampling.params import NO_TOP_K, SamplingParams
from pd_engine.sequence import Sequence as Choice
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.rows import Span, build_step, token_ids
from pd_ops.bench.engine_rows import Comparison, Kind, prompts_of

NEW_TOKENS = 2  # the first one, and that of one step


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Decoding `batch` sequences with `tokens` in the cache each, or reading one prompt of so many."""

    kind: Kind
    batch: int
    tokens: int

    @property
    def text(self) -> str:
        if self.kind is Kind.PREFILL:
            return f"prompt of {self.tokens}"
        return f"decode, batch {self.batch}, context {self.tokens}"

    @property
    def comparison(self) -> Comparison:
        """With the same prompts."""
        return Comparison(kind=self.kind, batch=self.batch, prompt_tokens=self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The rows of one forward: int64 [T], and where they stand."""

    ids_T: Tensor
    step: StepRows


class Work:
    """One case on one engine: what a step of it runs, and the step itself, as often as one likes."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], chunk_tokens: int) -> None:
        self.engine = engine
        self.choices = choices
        self._chunk_tokens = chunk_tokens

    def read(self) -> None:
        """The prompts, in chunks as a worker does it, and their first tokens; whatever was there before."""
        for choice in self.choices:
            del choice.token_ids[choice.num_prompt_tokens :]
            choice.num_computed, choice.pending_hidden = 0, None
            while choice.num_computed < choice.num_prompt_tokens:
                count = min(self._chunk_tokens, choice.num_prompt_tokens - choice.num_computed)
                prefill_step(self.engine, [Chunk(sequence=choice, num_tokens=count)])
            sample_first(self.engine, [choice])

    def decode(self) -> None:
        """One step after the first tokens, which is then forgotten."""
        decode_step(self.engine, self.choices)
        for choice in self.choices:
            del choice.token_ids[choice.num_prompt_tokens + 1 :]
            choice.num_computed = choice.num_prompt_tokens

    def prompt_pieces(self) -> list[Piece]:
        """The chunks of the first prompt."""
        [choice] = self.choices
        starts = range(0, choice.num_prompt_tokens, self._chunk_tokens)
        return [
            self._piece([Span(
                sequence=choice, start=start, count=min(self._chunk_tokens, choice.num_prompt_tokens - start)
            )], expand_prompts=self.engine.expand_prompts)
            for start in starts
        ]

    def decode_piece(self) -> Piece:
        return self._piece([Span(sequence=choice, start=choice.num_prompt_tokens, count=1) for choice in self.choices])

    def _piece(self, spans: Sequence[Span], *, expand_prompts: bool = False) -> Piece:
        step = build_step(spans, self.engine.layout.block_size, expand_prompts=expand_prompts)
        return Piece(ids_T=token_ids(spans), step=step)


@contextmanager
def work(engine: Engine, case: Case, chunk_tokens: int) -> Iterator[Work]:
    """With its prompts read.

    Raises:
        InvalidArgument: it is more than the model's context or the cache holds.
    """
    length = case.tokens + NEW_TOKENS
    num_blocks = engine.layout.num_blocks_for(length)
    if length > engine.max_context_length:
        raise InvalidArgument(f"{case.text}: the model's context is {engine.max_context_length} tokens")
    if case.batch * num_blocks > engine.pool.num_free:
        raise InvalidArgument(f"{case.text}: the cache has {engine.pool.num_free} blocks of {engine.layout.block_size}")
    choices = []
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=NO_TOP_K, seed=0, max_tokens=length, ignore_eos=True)
    for number, prompt in enumerate(prompts_of(case.comparison, engine.config.vocab_size, 0)):
        name = f"bench {number}"
        choices.append(Choice(
            name=name, token_ids=list(prompt), num_prompt_tokens=len(prompt), params=params, ending_ids=frozenset(),
            block_ids=engine.pool.allocate(num_blocks, name),
        ))
    try:
        found = Work(engine, choices, chunk_tokens)
        found.read()
        yield found
    finally:
        for choice in choices:
            engine.pool.release(choice.block_ids, choice.name)
