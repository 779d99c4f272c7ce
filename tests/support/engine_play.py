"""Plays requests through an engine's steps: alone, or together in any batches and chunks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from pd_engine.cache.checksums import slot_checksums
from pd_engine.engine import Engine
from pd_engine.sequence import FinishReason, SampledToken, Sequence
from pd_engine.steps.decode import decode_step, finish_reason, num_slots_needed
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from support.engine_cases import new_sequence, release


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it."""

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    ending_ids: frozenset[int] = frozenset()

    def sequence(self, engine: Engine, name: str, speculate: int) -> Sequence:
        return new_sequence(
            engine, self.prompt, name=name, speculate=speculate, ending_ids=self.ending_ids, **self.params
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All that must not depend on company, chunks or drafts: tokens with logprob bits, the end, the prompt's slots."""

    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None
    prompt_checksums: tuple[int, ...]


class Player:
    """Sequences of one engine, moved on by hand. `finish` checks that nothing is left behind."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequences: list[Sequence] = []
        self.tokens: list[list[SampledToken]] = []
        self.ends: list[FinishReason | None] = []
        self.checksums: list[tuple[int, ...]] = []
        self.longest: list[int] = []  # most tokens that one decode step gave each request
        self._num_free = engine.pool.num_free

    def add(self, request: Request, *, speculate: int = 0) -> int:
        """A request's number."""
        number = len(self.sequences)
        self.sequences.append(request.sequence(self.engine, f"request {number}", speculate))
        self.tokens.append([])
        self.ends.append(None)
        self.checksums.append(())
        self.longest.append(0)
        return number

    def remaining(self, number: int) -> int:
        """Prompt tokens that are not computed yet."""
        sequence = self.sequences[number]
        return max(0, sequence.num_prompt_tokens - sequence.num_computed)

    def prefill(self, sizes: dict[int, int]) -> None:
        """One step over so many tokens of each request, then the first token of those that are complete."""
        prefill_step(
            self.engine,
            [Chunk(sequence=self.sequences[number], num_tokens=size) for number, size in sizes.items()],
        )
        complete = [number for number in sizes if not self.remaining(number)]
        for number in complete:
            self.checksums[number] = self._checksums(self.sequences[number])
        if complete:
            firsts = sample_first(self.engine, [self.sequences[number] for number in complete])
            for number, token in zip(complete, firsts, strict=True):
                self.tokens[number].append(token)
                self.ends[number] = finish_reason(self.engine, self.sequences[number])

    def decode(self, numbers: Iterable[int]) -> None:
        chosen = list(numbers)
        block_size = self.engine.layout.block_size
        for number in chosen:
            sequence = self.sequences[number]
            assert num_slots_needed(sequence) <= len(sequence.block_ids) * block_size
        outputs = decode_step(self.engine, [self.sequences[number] for number in chosen])
        for number, output in zip(chosen, outputs, strict=True):
            self.tokens[number] += output.tokens
            self.ends[number] = output.finish_reason
            self.longest[number] = max(self.longest[number], len(output.tokens))

    def running(self) -> list[int]:
        """Requests that have their first token and go on."""
        return [n for n, end in enumerate(self.ends) if end is None and self.tokens[n]]

    def finish(self) -> list[Answer]:
        """Decodes what is still running, all together, and gives the blocks back."""
        while running := self.running():
            self.decode(running)
        for sequence, tokens in zip(self.sequences, self.tokens, strict=True):
            assert sequence.generated_ids == [token.token_id for token in tokens]
        release(self.engine, *self.sequences)
        assert self.engine.pool.num_free == self._num_free
        return [
            Answer(tokens=tuple(tokens), finish_reason=end, prompt_checksums=checksums)
            for tokens, end, checksums in zip(self.tokens, self.ends, self.checksums, strict=True)
        ]

    def _checksums(self, sequence: Sequence) -> tuple[int, ...]:
        return tuple(
            slot_checksums(self.engine.ops, self.engine.arena, sequence.block_ids, sequence.num_prompt_tokens)
        )


def alone(engine: Engine, request: Request, *, speculate: int = 0, sizes: Seq[int] | None = None) -> Answer:
    """The answer of a request that has the engine to itself, its prompt cut into the given sizes."""
    player = Player(engine)
    player.add(request, speculate=speculate)
    for size in sizes or [len(request.prompt)]:
        player.prefill({0: size})
    [answer] = player.finish()
    return answer


def together(engine: Engine, requests: Seq[Request], *, speculate: Seq[int]) -> list[Answer]:
    """The answers of requests that run in one batch from beginning to end."""
    player = Player(engine)
    for request, drafts in zip(requests, speculate, strict=True):
        player.add(request, speculate=drafts)
    player.prefill({number: len(request.prompt) for number, request in enumerate(requests)})
    return player.finish()
