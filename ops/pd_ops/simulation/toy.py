"""The toy model: its next token is a function of the tokens before it, and so are the contents of every slot. What it
reads it checks, so that a slot that was lost, mixed up or written by somebody else is seen as soon as it is read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from pd_engine.cache.arena import Arena
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import SampledToken, Sequence, TokenLogprobs
from pd_engine.steps.decode import DecodeOutput, finish_reason
from pd_engine.steps.draft import num_wanted_drafts
from pd_engine.steps.forward import Steps
from pd_engine.steps.prefill import Chunk
from pd_engine.steps.state import can_draft
from pd_ops.simulation.pool import WatchedPool

BLOCK_SIZE = 4
MAX_CONTEXT_LENGTH = 256
FIRST_TOKEN = 100
NUM_TOKENS = 1_000  # different ones that it generates
STOP_TOKEN = 99
STOP_EVERY = 60     # tokens, on average
MASK = (1 << 64) - 1
COMPONENT_SALTS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
SALTS = tuple(map(np.uint64, COMPONENT_SALTS))
GUESS = 0xDEAD  # what a rejected draft leaves
LAYOUT = CacheLayout(
    block_size=BLOCK_SIZE,
    components=(
        Component(name="layers.0", kind=ComponentKind.PAGED, width=2, dtype="fp32"),
        Component(name="mtp.0", kind=ComponentKind.PAGED, width=2, dtype="fp32", first_position=1),
    ),
)


def mix(value: int) -> int:
    """64 bits, well mixed (splitmix64's finalizer)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=65_536)
def _following(state: int, token_id: int) -> int:
    return mix(state * 31 + token_id + 1 & MASK)


def states(token_ids: Iterable[int]) -> list[int]:
    """Of each position: a function of the tokens up to it."""
    return list(itertools.accumulate(token_ids, _following, initial=1))[1:]


def next_token(state: int, params: SamplingParams) -> SampledToken:
    """What follows a position with this state."""
    noise = mix(state ^ mix(params.seed + 7 & MASK))
    token_id = STOP_TOKEN if noise % STOP_EVERY == 0 else FIRST_TOKEN + noise % NUM_TOKENS
    logprobs = None
    if params.logprobs is not None:
        logprobs = TokenLogprobs(logprob=-float(noise % 1024) / 256)
    return SampledToken(token_id=token_id, logprobs=logprobs)


def oracle(prompt_ids: Seq[int], params: SamplingParams, ending_ids: frozenset[int]) -> list[SampledToken]:
    """What one process would answer."""
    state = states(prompt_ids)[-1]
    answer: list[SampledToken] = []
    while len(answer) < params.max_tokens and not (answer and answer[-1].token_id in ending_ids):
        answer.append(next_token(state, params))
        state = _following(state, answer[-1].token_id)
    return answer


class ToyEngine(Engine):
    """An engine of two components without weights. `slots`: of each component, by block and place in it."""

    pool: WatchedPool

    def __init__(self, num_blocks: int) -> None:
        self.config = cast(Any, SimpleNamespace(vocab_size=4096, hidden_size=2, num_hidden_layers=1))
        self.ops = cast(Any, SimpleNamespace(name="toy", device=torch.device("cpu"), is_on_host=True))
        self.layout = LAYOUT
        self.dtype = "fp32"
        self.fingerprint = "70" * 16
        self.max_context_length = MAX_CONTEXT_LENGTH
        self.expand_prompts = False
        self.num_parameters = self.weights_bytes = 0
        self.load_seconds = 0.0
        self.arena = Arena(LAYOUT, num_blocks)
        self.pool = WatchedPool(num_blocks, on_reuse=self.arena.renew)
        self.mtp = cast(Any, SimpleNamespace())
        octets = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        self.slots = [
            octets[offset : offset + num_blocks * BLOCK_SIZE * 8].view(np.uint64).reshape(num_blocks, BLOCK_SIZE)
            for offset in self.arena.offsets
        ]


class ToyModel:
    """The steps of one worker's engine.

    Args:
        complain: told of what must never be, in words.
        clock: of work done; `note_step` lets it run on, by a step.
    """

    def __init__(
        self, complain: Callable[[str], None], clock: Callable[[], float], note_step: Callable[[], None]
    ) -> None:
        self._complain = complain
        self._note_step = note_step
        self.steps = Steps(
            prefill=self.prefill, sample_first=self.sample_first, decode=self.decode, catch_up=self.catch_up,
            clock=clock,
        )

    def prefill(self, engine: Engine, chunks: Seq[Chunk], on_component: Callable[[int], None]) -> None:
        assert isinstance(engine, ToyEngine)
        known = [states(chunk.sequence.token_ids) for chunk in chunks]
        for component in range(len(LAYOUT.components)):
            for chunk, values in zip(chunks, known, strict=True):
                sequence = chunk.sequence
                start, end = sequence.num_computed, sequence.num_computed + chunk.num_tokens
                if component == 0:
                    self._check(engine, sequence, values, 0, start)
                    self._write(engine, sequence, values[start:end], 0, start)
                elif sequence.num_computed_mtp >= start:  # else its slots came from a cache that has none
                    self._check(engine, sequence, values, 1, sequence.num_computed_mtp)
                    self._write(engine, sequence, values[sequence.num_computed_mtp : end], 1, sequence.num_computed_mtp)
                    sequence.num_computed_mtp = max(sequence.num_computed_mtp, end)
            on_component(component)
        for chunk, values in zip(chunks, known, strict=True):
            chunk.sequence.num_computed += chunk.num_tokens
            chunk.sequence.pending_hidden = _hidden(values[chunk.sequence.num_computed - 1 :][:1])
        self._note_step()

    def sample_first(self, engine: Engine, sequences: Seq[Sequence]) -> list[SampledToken | Internal]:
        firsts: list[SampledToken | Internal] = []
        for sequence in sequences:
            first = next_token(states(sequence.token_ids)[-1], sequence.params)
            sequence.token_ids.append(first.token_id)
            firsts.append(first)
        return firsts

    def decode(self, engine: Engine, sequences: Seq[Sequence], max_drafts: int) -> list[DecodeOutput | Internal]:
        assert isinstance(engine, ToyEngine)
        self._note_step()
        return [self._decode(engine, sequence, max_drafts) for sequence in sequences]

    def catch_up(self, engine: Engine, sequences: Seq[Sequence], ended: Seq[Sequence]) -> None:
        assert isinstance(engine, ToyEngine)
        for sequence in ended:
            if not can_draft(sequence):
                continue
            start, end = sequence.num_computed_mtp, sequence.num_computed
            values = states(sequence.token_ids[:end])
            self._check(engine, sequence, values, 1, start)
            self._write(engine, sequence, values[start:], 1, start)
            sequence.num_computed_mtp = end
            sequence.pending_hidden = _hidden(values[-1:])

    def _decode(self, engine: ToyEngine, sequence: Sequence, max_drafts: int) -> DecodeOutput:
        start = sequence.num_computed
        values = states(sequence.token_ids)
        self._check(engine, sequence, values, 0, start)
        num_drafts = min(num_wanted_drafts(sequence), max_drafts) if can_draft(sequence) else 0
        self._check_hidden(sequence, values)
        if num_drafts:
            self._check(engine, sequence, values, 1, sequence.num_computed_mtp)
            self._write(engine, sequence, values[sequence.num_computed_mtp :], 1, sequence.num_computed_mtp)
            sequence.num_computed_mtp = len(values)
        num_accepted = values[-1] % (num_drafts + 1)
        tokens: list[SampledToken] = []
        while len(tokens) <= num_accepted and not (tokens and tokens[-1].token_id in sequence.ending_ids):
            tokens.append(next_token(values[-1], sequence.params))
            sequence.token_ids.append(tokens[-1].token_id)
            values.append(_following(values[-1], tokens[-1].token_id))
        written = [*values[start : start + len(tokens)], *[GUESS] * (1 + num_drafts - len(tokens))]
        self._write(engine, sequence, written, 0, start)
        sequence.num_computed += len(tokens)
        sequence.num_drafted += num_drafts
        sequence.num_accepted += len(tokens) - 1
        first = sequence.num_computed_mtp - 1 if num_drafts else sequence.num_computed - 1
        sequence.pending_hidden = _hidden(values[first : sequence.num_computed])
        return DecodeOutput(
            tokens=tokens, num_drafted=num_drafts, num_accepted=len(tokens) - 1,
            finish_reason=finish_reason(engine, sequence),
        )

    # Slots

    def _check(self, engine: ToyEngine, sequence: Sequence, values: Seq[int], component: int, count: int) -> None:
        block_ids = sequence.block_ids[: -(-count // BLOCK_SIZE)]
        found = (engine.slots[component][block_ids] ^ SALTS[component]).reshape(-1)[:count].tolist()
        if found != values[:count]:
            position = next(i for i, (theirs, ours) in enumerate(zip(found, values, strict=False)) if theirs != ours)
            self._complain(f"{sequence.name}: slot {position} of component {component} holds something else")

    def _write(self, engine: ToyEngine, sequence: Sequence, values: Seq[int], component: int, start: int) -> None:
        slots, salt = engine.slots[component], COMPONENT_SALTS[component]
        for position, value in enumerate(values, start):
            block, place = sequence.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE
            if slots[block, place] != value ^ salt:
                num_owners = len(engine.pool.owners(block))
                # MTP's slots of a shared block may come later: whoever shares it before then never reads them.
                if num_owners == 0 or (num_owners > 1 and component == 0):
                    owners = ", ".join(engine.pool.owners(block)) or "nobody"
                    self._complain(f"{sequence.name} writes to block {block}, which belongs to {owners}")
                slots[block, place] = value ^ salt

    def _check_hidden(self, sequence: Sequence, values: Seq[int]) -> None:
        hidden = sequence.pending_hidden
        if hidden is None or hidden[-1].numpy().view(np.uint64)[0] != values[sequence.num_computed - 1]:
            self._complain(f"{sequence.name}: its hidden state is another one's")


def _hidden(values: Seq[int]) -> torch.Tensor:
    """[n, 2] fp32, bit for bit the states."""
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.float32).reshape(-1, 2))
