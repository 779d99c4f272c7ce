"""Rows do not depend on company, checked for real on this host: requests alone and together, compared bit by bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_engine.cache.checksums import slot_checksums
from pd_engine.engine import Engine
from pd_engine.errors import PdRelayError
from pd_engine.sampling.params import NO_TOP_K, SamplingParams
from pd_engine.sequence import SampledToken
from pd_engine.sequence import Sequence as Choice
from pd_engine.settings import EngineSettings
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.state import export_hidden
from pd_ops.doctor.check import Check, Result

NUM_TOKENS = 7
CACHE_MIB = 32
MAX_DRAFTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One request, and how it runs beside the others: its drafts a step, the sizes its prompt is cut into (the last
    one repeats)."""

    prompt_tokens: int
    temperature: float
    drafts: int
    chunks: tuple[int, ...]


# One token, within a block, over a tile of 64 keys, and a context where torch's own products were seen to differ.
PROBES = (
    Probe(prompt_tokens=1, temperature=0.0, drafts=2, chunks=(1,)),
    Probe(prompt_tokens=5, temperature=1.0, drafts=0, chunks=(3, 1)),
    Probe(prompt_tokens=70, temperature=0.0, drafts=1, chunks=(17, 1, 30)),
    Probe(prompt_tokens=201, temperature=0.7, drafts=MAX_DRAFTS, chunks=(64, 100, 2)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All of a request that must not depend on anything else.

    Attributes:
        tokens: with logprobs of the sampled and the most likely tokens.
        slot_checksums: of the prompt's latents, in every layer.
        prompt_hidden: bytes of the last prompt position's h.
    """

    tokens: tuple[SampledToken, ...]
    slot_checksums: tuple[int, ...]
    prompt_hidden: bytes


def rows_check(model: Path, settings: EngineSettings, ops: str) -> Check:
    """Runs `PROBES` alone and together on one implementation of the ops: "cpu" or "reference"."""
    name = f"rows ({ops})"
    began_s = time.monotonic()
    try:
        chosen = settings.model_copy(
            update={"ops": ops, "cache_mib": CACHE_MIB, "prefill_form": "absorbed", "max_context_length": None}
        )
        engine = Engine.load(model, chosen, max_speculate=MAX_DRAFTS)
    except PdRelayError as error:
        return Check(name=name, result=Result.ABSENT, sentence=error.message)
    differences = find_differences(engine)
    seconds = time.monotonic() - began_s
    formats = f"{engine.ops.name}, {_formats(engine)}"
    what = f"{formats}: {len(PROBES)} requests alone and together, in chunks and with drafts"
    if differences:
        sentence = f"{what}: they differ ({'; '.join(differences)}); tokens would depend on what else is running"
        return Check(name=name, result=Result.FAILED, sentence=sentence)
    return Check(name=name, result=Result.OK, sentence=f"{what}: bit for bit the same ({seconds:.1f} s)")


def _formats(engine: Engine) -> str:
    """Such as "bf16, FP8 weights, FP8 latents"."""
    weights = ["FP8 weights"] if engine.config.weight_format == "fp8" else []
    latents = ["FP8 latents"] if engine.layout.has_fp8 else []
    return ", ".join([engine.dtype, *weights, *latents])


def find_differences(engine: Engine) -> list[str]:
    """What differs, a probe each; empty if nothing does."""
    alone = [run_probes(engine, [number], plain=True)[0] for number in range(len(PROBES))]
    together = run_probes(engine, range(len(PROBES)), plain=False)
    return [
        f"prompt of {probe.prompt_tokens}: {', '.join(parts)}"
        for probe, one, other in zip(PROBES, alone, together, strict=True) if (parts := _different_parts(one, other))
    ]


def run_probes(engine: Engine, numbers: Sequence[int], *, plain: bool) -> list[Answer]:
    """The answers of some probes that share every step. `plain`: prompts in one chunk, no drafts."""
    choices = [_choice(engine, number, plain=plain) for number in numbers]
    try:
        _prefill(engine, choices, [(1 << 30,) if plain else PROBES[number].chunks for number in numbers])
        checksums = [
            tuple(slot_checksums(engine.ops, engine.arena, choice.block_ids, choice.num_prompt_tokens))
            for choice in choices
        ]
        hidden = [export_hidden(choice) for choice in choices]
        tokens = [[token] for token in sample_first(engine, choices)]
        while running := [index for index, choice in enumerate(choices) if choice.finish_reason() is None]:
            outputs = decode_step(engine, [choices[index] for index in running])
            for index, output in zip(running, outputs, strict=True):
                tokens[index] += output.tokens
        return [
            Answer(tokens=tuple(mine), slot_checksums=sums, prompt_hidden=state)
            for mine, sums, state in zip(tokens, checksums, hidden, strict=True)
        ]
    finally:
        for choice in choices:
            engine.pool.release(choice.block_ids, choice.name)


def _choice(engine: Engine, number: int, *, plain: bool) -> Choice:
    probe = PROBES[number]
    params = SamplingParams(
        temperature=probe.temperature, top_p=1.0, top_k=NO_TOP_K, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True,
        logprobs=5,
    )
    step = 7 * number + 3
    name, size = f"doctor {number}", engine.config.vocab_size
    token_ids = [(index * index + step * index + step) % size for index in range(probe.prompt_tokens)]
    num_blocks = engine.layout.num_blocks_for(probe.prompt_tokens + NUM_TOKENS + MAX_DRAFTS)
    return Choice(
        name=name, token_ids=token_ids, num_prompt_tokens=probe.prompt_tokens, params=params, ending_ids=frozenset(),
        speculate=0 if plain or not engine.has_mtp else probe.drafts,
        block_ids=engine.pool.allocate(num_blocks, name),
    )


def _prefill(engine: Engine, choices: Sequence[Choice], sizes: Sequence[tuple[int, ...]]) -> None:
    """All prompts, each step taking the next chunk of every one that is not complete."""
    step = 0
    while any(choice.num_computed < choice.num_prompt_tokens for choice in choices):
        chunks = [
            Chunk(
                sequence=choice,
                num_tokens=min(cut[min(step, len(cut) - 1)], choice.num_prompt_tokens - choice.num_computed),
            )
            for choice, cut in zip(choices, sizes, strict=True) if choice.num_computed < choice.num_prompt_tokens
        ]
        prefill_step(engine, chunks)
        step += 1


def _different_parts(one: Answer, other: Answer) -> list[str]:
    named = (
        ("latents", one.slot_checksums == other.slot_checksums),
        ("last state", one.prompt_hidden == other.prompt_hidden),
        ("tokens", [token.token_id for token in one.tokens] == [token.token_id for token in other.tokens]),
        ("logprobs", [token.logprobs for token in one.tokens] == [token.logprobs for token in other.tokens]),
    )
    return [name for name, same in named if not same]
