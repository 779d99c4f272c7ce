"""The compute thread of a decode worker in `room_world`: slots that hold what their tokens make of them, steps and
chunks without a model, moves that take their time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from decode_worker.host_tier import Stored
from decode_worker.local_prefill import LocalFirst, PromptReport
from decode_worker.runner import Progress, StepReport
from decode_worker.scheduler import Batch, Place
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.priority import Turn
from pd_engine.sequence import SampledToken, Sequence

if TYPE_CHECKING:
    from typing import Any

    from support.room_world import World

BLOCK_SIZE = 4
LAYOUT = CacheLayout(
    block_size=BLOCK_SIZE,
    components=(Component(name="layers.0", kind=ComponentKind.PAGED, width=1, dtype="fp32"),),
)
NO_LOGPROBS = np.zeros((1, 0), dtype=np.uint64)


def next_token(token_ids: list[int]) -> int:
    """What every model of this world says."""
    return hash(tuple(token_ids)) % 5


def slot_value(token_ids: list[int], position: int) -> int:
    """A slot's contents: a function of the tokens up to it."""
    return hash(tuple(token_ids[: position + 1]))


@dataclass
class Slots:
    """The arena."""

    blocks: dict[int, list[int | None]] = field(default_factory=dict)

    def reused(self, block: int) -> None:
        self.blocks[block] = [None] * BLOCK_SIZE

    def write(self, block_ids: list[int], position: int, value: int | None) -> None:
        self.blocks[block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = value

    def check(self, name: str, block_ids: list[int], token_ids: list[int], count: int) -> None:
        for position in range(count):
            found = self.blocks[block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert found == slot_value(token_ids, position), f"{name}: slot {position} holds something else"


class Copy:
    """Stands for a `HostCopy`."""

    def __init__(self, world: World, contents: list[list[int | None]]) -> None:
        self.contents = contents
        self.num_blocks = len(contents)
        self._world = world
        world.num_host_blocks += self.num_blocks
        assert world.num_host_blocks <= world.max_host_blocks, "the host tier is larger than it may be"
        self.is_closed = False

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._world.num_host_blocks -= self.num_blocks


class Runner:
    """Stands for `DecodeRunner`: the same calls, steps without a model, moves that take their time."""

    def __init__(self, world: World, max_batch: int) -> None:
        self.engine = SimpleNamespace(
            config=SimpleNamespace(vocab_size=1_000, hidden_size=1), has_mtp=True, dtype="fp32",
            ops=SimpleNamespace(device="cpu"),
        )
        self._world = world
        self._batch = Batch(max_batch)
        self._sequences: dict[str, Sequence] = {}
        self._places: dict[str, Place] = {}
        self._prompts: dict[str, Sequence] = {}
        self._moves: dict[str, tuple[Sequence, Place, Copy | None, int, int]] = {}

    def add(self, sequence: Sequence, place: Place) -> None:
        self._sequences[sequence.name], self._places[sequence.name] = sequence, place
        self._batch.join(sequence.name, place)

    def add_prompt(self, prompt: Sequence, turn: Turn, *, with_checksums: bool) -> None:
        assert prompt.num_computed < prompt.num_tokens
        self._prompts[prompt.name] = prompt

    def grant(self, name: str, block_ids: list[int]) -> None:
        if name in self._sequences:
            self._sequences[name].block_ids += block_ids

    def move_out(self, name: str) -> None:
        if name in self._sequences:
            sequence = self._sequences[name]
            place = self._forget(name)
            self._moves[name] = (sequence, place, None, 0, self._world.random.randint(0, 2))

    def bring_back(self, stored: Stored, block_ids: list[int], num_held: int) -> None:
        stored.sequence.block_ids = list(block_ids)
        copy = cast("Copy", stored.copy)
        self._moves[stored.sequence.name] = (
            stored.sequence, stored.place, copy, num_held, self._world.random.randint(0, 2)
        )

    def drop(self, name: str) -> None:
        if name in self._sequences:
            self._forget(name)
        self._prompts.pop(name, None)
        move = self._moves.pop(name, None)
        if move is not None and move[2] is not None:
            move[2].close()

    def step(self) -> StepReport:
        moved_out, moved_back = self._advance_moves()
        members = [self._sequences[name] for name in self._batch.next_step(self._is_ready)]
        progress = [self._decode(sequence) for sequence in members]
        for item in progress:
            if item.finish_reason:
                self._forget(item.name)
        return StepReport(
            moved_out=moved_out, moved_back=moved_back, progress=progress, failed={},
            num_running=self._batch.num_running, seconds=0.01, prompts=self._compute_prompts(),
        )

    def _compute_prompts(self) -> PromptReport:
        """A chunk of one of them, or none."""
        waiting = [prompt for prompt in self._prompts.values() if self._world.random.random() < 0.5]
        if not waiting:
            return PromptReport(was_busy=bool(self._prompts))
        prompt, slots, firsts = self._world.random.choice(waiting), self._world.slots, []
        slots.check(prompt.name, prompt.block_ids, prompt.token_ids, prompt.num_computed)
        start = prompt.num_computed
        prompt.num_computed += self._world.random.randint(1, prompt.num_tokens - start)
        prompt.num_computed_mtp = max(prompt.num_computed_mtp, prompt.num_computed)
        for position in range(start, prompt.num_computed):
            slots.write(prompt.block_ids, position, slot_value(prompt.token_ids, position))
        progress = (prompt.name, prompt.num_computed, prompt.num_computed_mtp)
        if prompt.num_computed == prompt.num_tokens:
            del self._prompts[prompt.name]
            prompt.token_ids.append(next_token(prompt.token_ids))
            reason, token = prompt.finish_reason(), SampledToken(token_id=prompt.token_ids[-1])
            firsts.append(LocalFirst(
                sequence=prompt, token=token, finish_reason=reason.value if reason else "", stop_reason=""
            ))
        return PromptReport(
            progress=[progress], firsts=firsts, num_tokens=prompt.num_computed - start, seconds=0.01, was_busy=True
        )

    def _forget(self, name: str) -> Place:
        del self._sequences[name]
        self._batch.leave([name])
        return self._places.pop(name)

    def _is_ready(self, name: str) -> bool:
        sequence = self._sequences[name]
        return sequence.num_tokens + self._num_drafts(sequence) <= len(sequence.block_ids) * BLOCK_SIZE

    @staticmethod
    def _num_drafts(sequence: Sequence) -> int:
        return max(0, min(sequence.speculate, sequence.params.max_tokens - sequence.num_generated - 1))

    def _decode(self, sequence: Sequence) -> Progress:
        slots, num_drafts = self._world.slots, self._num_drafts(sequence)
        slots.check(sequence.name, sequence.block_ids, sequence.token_ids, sequence.num_computed)
        start, count = sequence.num_computed, 1 + self._world.random.randint(0, num_drafts)
        for _ in range(count):
            sequence.token_ids.append(next_token(sequence.token_ids))
        for position in range(start, start + 1 + num_drafts):
            is_true = position < start + count
            slots.write(
                sequence.block_ids, position, slot_value(sequence.token_ids, position) if is_true else None
            )
        sequence.num_computed += count
        reason = sequence.finish_reason()
        return Progress(
            name=sequence.name, tokens=[SampledToken(token_id=token) for token in sequence.token_ids[-count:]],
            num_final_mtp=sequence.num_computed, drafted=0, accepted=0,
            finish_reason=reason.value if reason else "", stop_reason="",
        )

    def _advance_moves(self) -> tuple[list[Stored], list[str]]:
        moved_out, moved_back = [], []
        for name, (sequence, place, copy, num_held, left) in list(self._moves.items()):
            if left:
                self._moves[name] = (sequence, place, copy, num_held, left - 1)
                continue
            del self._moves[name]
            blocks = self._world.slots.blocks
            if copy is None:
                used = sequence.block_ids[: LAYOUT.num_blocks_for(sequence.num_computed)]
                copy = Copy(self._world, [list(blocks[block]) for block in used])
                sequence.block_ids = []
                moved_out.append(Stored(sequence=sequence, place=place, copy=cast("Any", copy)))
            else:
                for index in range(num_held, copy.num_blocks):
                    blocks[sequence.block_ids[index]] = list(copy.contents[index])
                copy.close()
                self.add(sequence, place)
                moved_back.append(name)
        return moved_out, moved_back
