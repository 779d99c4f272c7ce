"""A mid-sized model end to end on one device: the cores of a prefill and a decode worker in one process.

The cores are the workers' own (`PrefillRunner`, `DecodeRunner`), each with an engine, a block pool and an arena of its
own. The handoff copies pieces from one arena to the other in device memory, component by component as prefill finishes
them. Tokens and logprob bits must equal those of one engine that runs each request alone, without drafts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from decode_worker.runner import DecodeRunner
from decode_worker.runner import StepReport as DecodeReport
from decode_worker.scheduler import Place
from gpu_bench.device_engine import TINY, V3_WIDTH, build_engine, random_weights
from gpu_bench.shapes import Maker
from gpu_bench.steps import KEPT_CHARACTERS, shortened
from pd_engine.engine import Engine
from pd_engine.model.config import ModelConfig
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_kernels.block_copy.triton import copy_pieces
from pd_kernels.triton_ops import TritonOps
from prefill_worker.runner import PrefillRunner

ANY_PLACE = Place()

CHUNK_TOKENS = 256
SPECULATE = 1


class ErrorLog(logging.Handler):
    """What the workers' cores log of a step that fails: they report no more than that it did."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(self.format(record))

    def check(self, failed: Mapping[str, Exception]) -> None:
        """Raises AssertionError with what was logged, if there are such requests."""
        logged = "\n".join(shortened(text, KEPT_CHARACTERS // 2) for text in self._texts)
        assert not failed, f"{failed}\n{logged}"


@contextlib.contextmanager
def logged_errors() -> Iterator[ErrorLog]:
    log = ErrorLog()
    logging.getLogger().addHandler(log)
    try:
        yield log
    finally:
        logging.getLogger().removeHandler(log)


class DeviceHandoff:
    """One prompt's way from the prefill engine's arena to the decode engine's."""

    def __init__(self, source: Engine, target: Engine, prompt: Sequence, target_blocks: list[int],
                 decode: DecodeRunner) -> None:
        self._source, self._target, self._prompt = source, target, prompt
        self._target_blocks, self._decode = target_blocks, decode
        self._done = [0] * len(source.layout.components)
        self.num_bytes = 0

    def publish(self, component: int, num_valid_tokens: int) -> None:
        """Copies the slots of a component that became valid, piece by piece."""
        layout, start = self._source.layout, self._done[component]
        slot_bytes, block_size = layout.components[component].slot_bytes, layout.block_size
        offsets: list[tuple[int, int, int]] = []
        while start < num_valid_tokens:
            end = min(num_valid_tokens, (start // block_size + 1) * block_size)
            block, inside = start // block_size, start % block_size * slot_bytes
            offsets.append((
                self._prompt.block_ids[block] * layout.piece_bytes(component) + inside,
                self._target_blocks[block] * layout.piece_bytes(component) + inside,
                (end - start) * slot_bytes,
            ))
            start = end
        self._done[component] = max(self._done[component], num_valid_tokens)
        if offsets:
            source, target = (
                engine.arena.components[component].view(torch.uint8).flatten()
                for engine in (self._source, self._target)
            )
            columns = torch.tensor(offsets).to(source.device)
            copy_pieces(source, target, *(column.contiguous() for column in columns.unbind(1)),
                        max_length=block_size * slot_bytes)
            self.num_bytes += sum(length for _, _, length in offsets)

    def finish(self, prompt: Sequence, first: SampledToken) -> None:
        """Everything is there: the decode worker takes over."""
        assert prompt.pending_hidden is not None
        self._decode.add(Sequence(
            name=prompt.name, token_ids=list(prompt.token_ids), num_prompt_tokens=prompt.num_prompt_tokens,
            params=prompt.params, ending_ids=prompt.ending_ids, speculate=SPECULATE, block_ids=self._target_blocks,
            num_computed=prompt.num_prompt_tokens, num_computed_mtp=prompt.num_prompt_tokens,
            pending_hidden=prompt.pending_hidden[-1:].clone(),
        ))


def run(device: torch.device, *, tiny: bool = False) -> dict[str, Any]:
    """{requests, tokens, drafted, accepted, bytes, seconds}.

    Raises:
        AssertionError: a step failed, with what the workers' cores logged; a token or a logprob differs from the
            monolithic run's, or too many or few bytes were moved.
    """
    config = ModelConfig.parse(TINY if tiny else V3_WIDTH)
    ops = TritonOps(device)
    weights = random_weights(config, Maker.on(str(device), seed=7), ops)
    lengths, num_tokens = ((3, 9), 3) if tiny else ((1, 17, 300, 1100), 16)
    prompts = [_ids(config.vocab_size, length, seed=length) for length in lengths]
    num_blocks = 3 * (sum(lengths) // 16 + 2 * len(lengths) + num_tokens)
    prefill_engine, decode_engine, alone = (
        build_engine(config, weights, ops, num_blocks=num_blocks) for _ in range(3)
    )
    began_s = time.perf_counter()
    with logged_errors() as log:
        results, sequences, num_bytes = _disaggregated(prefill_engine, decode_engine, prompts, num_tokens, log)
    seconds = time.perf_counter() - began_s
    for number, prompt in enumerate(prompts):
        expected = _monolithic(alone, _sequence(alone, number, prompt, num_tokens))
        assert results[f"request {number}"] == expected, f"request {number}: {results[f'request {number}']} {expected}"
    moved = sum(length * prefill_engine.layout.bytes_per_token for length in lengths)
    assert num_bytes == moved, f"{num_bytes} bytes were handed over; {moved} are valid"
    return {
        "requests": len(prompts), "tokens": sum(len(tokens) for tokens in results.values()), "bytes": num_bytes,
        "drafted": sum(s.num_drafted for s in sequences), "accepted": sum(s.num_accepted for s in sequences),
        "seconds": round(seconds, 3),
    }


def _disaggregated(
    prefill_engine: Engine, decode_engine: Engine, prompts: list[list[int]], num_tokens: int, log: ErrorLog
) -> tuple[dict[str, list[SampledToken]], list[Sequence], int]:
    """(tokens of each request, its decoding sequences, bytes handed over); both cores take turns."""
    results: dict[str, list[SampledToken]] = {}
    taken: list[Sequence] = []

    def on_decode(report: DecodeReport) -> None:
        log.check(report.failed)
        for item in report.progress:
            results[item.name] += item.tokens

    class Decode(DecodeRunner):
        def add(self, sequence: Sequence, place: Place = ANY_PLACE) -> None:
            taken.append(sequence)
            super().add(sequence, Place(arrival=len(taken)))

    decode = Decode(decode_engine, max_batch=64, report=on_decode)

    def on_prefill(report: Any) -> None:
        log.check(report.failed)
        for first in report.first_tokens:
            results[first.name] = [first.token]

    prefill = PrefillRunner(prefill_engine, CHUNK_TOKENS, on_prefill)
    handoffs = []
    for number, ids in enumerate(prompts):
        sequence = _sequence(prefill_engine, number, ids, num_tokens)
        blocks = decode_engine.pool.allocate(len(sequence.block_ids), sequence.name)
        handoffs.append(DeviceHandoff(prefill_engine, decode_engine, sequence, blocks, decode))
        prefill.add(sequence, handoffs[-1])
    busy = True
    while busy:
        prefilled = prefill.step()
        busy = decode.step() or prefilled
    return results, taken, sum(handoff.num_bytes for handoff in handoffs)


def _monolithic(engine: Engine, sequence: Sequence) -> list[SampledToken]:
    """The request alone, its prompt in one step, without drafts."""
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=sequence.num_tokens)])
    tokens = sample_first(engine, [sequence])
    while len(tokens) < sequence.params.max_tokens:
        tokens += decode_step(engine, [sequence])[0].tokens
    engine.pool.release(sequence.block_ids, sequence.name)
    return tokens


def _sequence(engine: Engine, number: int, ids: list[int], num_tokens: int) -> Sequence:
    """Every other request is greedy."""
    params = SamplingParams(temperature=0.8 * (number % 2), top_p=0.95 if number % 2 else 1.0, top_k=-1, seed=number,
                            max_tokens=num_tokens, logprobs=1)
    sequence = Sequence(name=f"request {number}", token_ids=list(ids), num_prompt_tokens=len(ids), params=params,
                        ending_ids=frozenset())
    sequence.block_ids = engine.pool.allocate(engine.layout.num_blocks_for(len(ids) + num_tokens), sequence.name)
    return sequence


def _ids(vocab_size: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(5, vocab_size, (count,), generator=generator)]
