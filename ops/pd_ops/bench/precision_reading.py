"""What an engine makes of known texts: the logits of every position, and greedy answers; and how two of them differ."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.sampling.params import NO_TOP_K, SamplingParams
from pd_engine.sequence import Sequence
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.rows import Span, build_step, token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Attributes:
    logits_NZ: float32, of every position of the texts that a known token follows.
    answers: greedy continuations of their beginnings.
    """

    logits_NZ: Tensor
    answers: tuple[tuple[int, ...], ...]


def read(engine: Engine, texts: Seq[Seq[int]], *, prompt_tokens: int, answer_tokens: int) -> Reading:
    """`prompt_tokens`: of each text, that the answers continue."""
    answers = tuple(
        tuple(complete(engine, text[:prompt_tokens], answer_tokens, temperature=0.0)) for text in texts
    )
    return Reading(logits_NZ=logits_of(engine, texts), answers=answers)


def logits_of(engine: Engine, texts: Seq[Seq[int]]) -> Tensor:
    """As serving would compute them: slots are written, then attended."""
    logits = []
    for text in texts:
        params = SamplingParams(temperature=0.0, top_p=1.0, top_k=NO_TOP_K, seed=0, max_tokens=1)
        sequence = Sequence(
            name="text", token_ids=list(text), num_prompt_tokens=len(text), params=params, ending_ids=frozenset(),
            speculate=0, block_ids=engine.pool.allocate(engine.layout.num_blocks_for(len(text)), "text"),
        )
        spans = [Span(sequence=sequence, start=0, count=len(text))]
        hidden = engine.main.forward(token_ids(spans), build_step(spans, engine.layout.block_size), engine.main_caches)
        logits.append(engine.main.logits(hidden)[:-1].clone())
        engine.pool.release(sequence.block_ids, "text")
    return torch.cat(logits)


def complete(engine: Engine, prompt: Seq[int], num_tokens: int, *, temperature: float, seed: int = 0) -> list[int]:
    """So many tokens after the prompt."""
    params = SamplingParams(
        temperature=temperature, top_p=1.0, top_k=NO_TOP_K, seed=seed, max_tokens=num_tokens, ignore_eos=True
    )
    sequence = Sequence(
        name="completion", token_ids=list(prompt), num_prompt_tokens=len(prompt), params=params,
        ending_ids=frozenset(), speculate=0,
        block_ids=engine.pool.allocate(engine.layout.num_blocks_for(len(prompt) + num_tokens), "completion"),
    )
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=len(prompt))])
    sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        decode_step(engine, [sequence])
    engine.pool.release(sequence.block_ids, "completion")
    return sequence.token_ids[len(prompt) :]


def relative_error(logits_NZ: Tensor, expected_NZ: Tensor) -> float:
    """Of a row the root mean square of the difference, over that of the expected logits around their mean; the median
    of all rows: in some a router chooses another expert, in any dtype, and their errors are no matter of precision."""
    spread_N = (expected_NZ - expected_NZ.mean(dim=-1, keepdim=True)).square().mean(dim=-1)
    return float(((logits_NZ - expected_NZ).square().mean(dim=-1) / spread_N).sqrt().median())


def nats_a_token(logits_NZ: Tensor, texts: Seq[Seq[int]]) -> float:
    following = torch.tensor([token for text in texts for token in text[1:]])
    return float(torch.nn.functional.cross_entropy(logits_NZ, following))


def same_choice(logits_NZ: Tensor, expected_NZ: Tensor) -> float:
    """The share of positions whose most likely token is the same."""
    return float((logits_NZ.argmax(-1) == expected_NZ.argmax(-1)).float().mean())


def first_differences(answers: Seq[Seq[int]], expected: Seq[Seq[int]]) -> list[int]:
    """The index of each answer's first token that is another one; its length if there is none."""
    return [
        next((index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        for ours, theirs in zip(answers, expected, strict=True)
    ]
