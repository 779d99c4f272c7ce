"""A request's answer does not depend on what was cached: any split of its tokens between cached and new ones, whoever
left the cached ones, with and without MTP slots, resumed at any index, gives the same bits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_engine.cache.checksums import slot_checksums
from pd_engine.cache.prefix import PrefixCache
from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.state import can_draft, take_cached
from support.engine_cases import available_ops, load_engine, random_ids, release, release_all
from support.engine_play import Request, alone

PARAMS = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 20, "logprobs": 1}
LENGTHS = (33, 47, 48)
CASES = [("bf16", "absorbed"), ("fp32", "absorbed"), ("bf16", "expanded")]
SALTS = itertools.count()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the first dense; most drafts are accepted."""
    path = tmp_path_factory.mktemp("prefix") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=5, layer_scale=0.15)
    return path


@dataclass(frozen=True)
class Expected:
    """A request alone, without a cache: its tokens, and the checksums of prompt and answer by (component, block)."""

    request: Request
    tokens: tuple[SampledToken, ...]
    checksums: dict[tuple[int, int], int]


def expected(engine: Engine, request: Request) -> Expected:
    tokens = alone(engine, request).tokens
    sequence = request.sequence(engine, "expected", 0)
    sequence.token_ids += [token.token_id for token in tokens]
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=sequence.num_tokens)])
    checksums = block_checksums(engine, sequence)
    release(engine, sequence)
    return Expected(request, tokens, checksums)


def block_checksums(engine: Engine, sequence: Sequence) -> dict[tuple[int, int], int]:
    """Of the full blocks of what is computed; of MTP's layer as far as its slots are final."""
    block_size, num_final = engine.layout.block_size, [sequence.num_computed] * len(engine.layout.components)
    num_final[engine.mtp_component] = sequence.num_computed_mtp
    num_blocks = sequence.num_computed // block_size
    values = slot_checksums(engine.ops, engine.arena, sequence.block_ids, num_blocks * block_size)
    places = itertools.product(range(len(num_final)), range(num_blocks))
    return {
        (component, block): value for (component, block), value in zip(places, values, strict=True)
        if (block + 1) * block_size <= num_final[component]
    }


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def cache(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[Engine, PrefixCache, list[Expected]]:
    """The engine, its cache, and what some requests must give: their prompts begin alike, and the last one is another
    one's with its answer."""
    dtype, form = request.param
    engine = load_engine(checkpoint, ops=available_ops()[-1], dtype=dtype, prefill_form=form, cache_mib=1)
    prompts = [tuple(random_ids(320, length, seed=3)) for length in LENGTHS]
    answers = [expected(engine, Request(prompt=prompt, params=PARAMS)) for prompt in prompts]
    turn = prompts[0] + tuple(token.token_id for token in answers[0].tokens)
    answers.append(expected(engine, Request(prompt=turn, params=PARAMS)))
    prefixes = PrefixCache(
        engine.pool, fingerprint=engine.fingerprint, block_size=engine.layout.block_size,
        prompts_only=form == "expanded",
    )
    return engine, prefixes, answers


class Turn:
    """One sequence that resumes a request after its first tokens, on whatever is cached."""

    def __init__(
        self, engine: Engine, cache: PrefixCache, request: Request, emitted: list[int], *, salt: str, speculate: int,
        with_mtp: bool,
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.sequence = Sequence(
            name="turn", token_ids=[*request.prompt, *emitted], num_prompt_tokens=len(request.prompt),
            params=SamplingParams(**({"top_k": -1} | request.params)), ending_ids=frozenset(), speculate=speculate,
        )
        self.chain = cache.chain(self.sequence.token_ids, num_prompt_tokens=len(request.prompt), salt=salt)
        cached = cache.match(self.chain, with_mtp=with_mtp)
        engine.pool.hold(cached, "turn")
        count = engine.layout.num_blocks_for(len(request.prompt) + self.sequence.params.max_tokens)
        self.sequence.block_ids = [*cached, *engine.pool.allocate(count - len(cached), "turn")]
        block_size = engine.layout.block_size
        num_mtp_blocks = cache.begin(self.chain, self.sequence.block_ids)
        take_cached(
            self.sequence, num_cached=len(cached) * block_size, num_cached_mtp=num_mtp_blocks * block_size
        )

    @property
    def remaining(self) -> int:
        return self.sequence.num_tokens - self.sequence.num_computed

    def prefill(self, num_tokens: int) -> None:
        prefill_step(self.engine, [Chunk(sequence=self.sequence, num_tokens=num_tokens)])
        self.store([])

    def first(self) -> list[SampledToken]:
        tokens = sample_first(self.engine, [self.sequence])
        self.store(tokens)
        return tokens

    def decode(self) -> list[SampledToken]:
        [output] = decode_step(self.engine, [self.sequence])
        self.store(output.tokens)
        return output.tokens

    def store(self, tokens: list[SampledToken]) -> None:
        self.chain.extend([token.token_id for token in tokens])
        self.cache.store(
            self.chain, self.sequence.block_ids, num_final=self.sequence.num_computed,
            num_final_mtp=self.sequence.num_computed_mtp,
        )

    def end(self) -> None:
        self.engine.pool.release(self.sequence.block_ids, "turn")
        self.cache.check_integrity()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_split_between_cached_and_new_gives_the_answer_of_a_request_alone(
    cache: tuple[Engine, PrefixCache, list[Expected]], seed: int
) -> None:
    """Turn after turn leaves what it has computed, up to where it is abandoned."""
    engine, prefixes, answers = cache
    release_all(engine)
    rng, salt = random.Random(seed), f"example {next(SALTS)}"
    for _ in range(rng.randint(2, 5)):
        answer = rng.choice(answers)
        num_emitted = rng.randrange(len(answer.tokens))
        turn = Turn(
            engine, prefixes, answer.request, [token.token_id for token in answer.tokens[:num_emitted]], salt=salt,
            speculate=rng.randint(0, 3), with_mtp=rng.random() < 0.5,
        )
        while turn.remaining:
            turn.prefill(rng.randint(1, turn.remaining))
        drafts = can_draft(turn.sequence)
        tokens = turn.first()
        num_wanted = rng.randint(1, len(answer.tokens) - num_emitted)
        while len(tokens) < num_wanted:
            tokens += turn.decode()
        assert tokens == list(answer.tokens[num_emitted : num_emitted + len(tokens)])
        assert drafts or turn.sequence.num_drafted == 0
        assert block_checksums(engine, turn.sequence).items() <= answer.checksums.items()
        turn.end()
    assert engine.pool.num_free == engine.pool.num_blocks
