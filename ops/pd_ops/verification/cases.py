"""The requests of a verification run. Pure: the same seed gives the same cases."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pd_engine.text.defaults import SamplingFields
from pd_ops.request_options import Prompt, TextPrompt, TokensPrompt

MAX_PROMPT_TOKENS = 1_000
MAX_NEW_TOKENS = 32
TEXT_SHARE = 0.3  # of the prompts that are long enough; the others are random ids of the whole vocabulary
EOS_SHARE = 0.2   # of the cases that may end at the checkpoint's end tokens
PROCESSED_SHARE = 0.3  # of the cases in which something is done to the logits before the sampler sees them
MAX_BIASED_TOKENS = 4

# Words of one to four bytes a character, with what a tokenizer splits oddly.
WORDS = (
    "a", "the", "function", "returns", "None", "list", "of", "values", "x = 3.14", "naïve", "Straße", "数据", "模型",
    "🙂", "\n", "\t", "  ", "e\u0301", "<|user|>", "“quoted”", "0x1F", "Привет", "...", "end.",
)


class Phase(Enum):
    """What a case finds in the cluster."""

    COLD = "cold"  # it uses nothing of what is cached
    WARM = "warm"  # blocks of the case that it follows, and of others
    SPLIT = "split"  # the first k tokens of its prompt, for every k, or nothing that it could use
    RESUMED = "resumed"  # a client that has some of the tokens already
    PRESSED = "pressed"  # a decode pool that has no room for all that run


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One request.

    Attributes:
        prompt: at least one token, and room for its new tokens behind it.
        follows: number of the case on whose workers it runs; None: on any.
        cache_salt: what it shares cached blocks with has the same.
        emitted: the first tokens of the answer, if the client has them; None: it has not asked before.
    """

    number: int
    prompt: Prompt
    sampling: SamplingFields
    phase: Phase = Phase.COLD
    follows: int | None = None
    cache_salt: str = ""
    emitted: tuple[int, ...] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def speculates(self) -> bool:
        return bool(self.sampling.speculate)

    @property
    def mode(self) -> str:
        """Such as "seeded, speculation on", or "warm: seeded, speculation on"."""
        phase = "" if self.phase is Phase.COLD else f"{self.phase.value}: "
        return f"{phase}{'greedy' if self.is_greedy else 'seeded'}, speculation {'on' if self.speculates else 'off'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseLimits:
    """What the cases must fit.

    Attributes:
        vocab_size: token ids lie below it.
        max_context_length: prompt and generated tokens.
        block_size, chunk_tokens: whose edges the lengths shall meet.
        max_speculate: draft tokens a step where speculation is on; 0 if the model or the cluster has none.
    """

    vocab_size: int
    max_context_length: int
    block_size: int
    chunk_tokens: int
    max_speculate: int

    @property
    def max_prompt_tokens(self) -> int:
        """Of a case that follows none."""
        return min(MAX_PROMPT_TOKENS, self.longest_prompt_tokens)

    @property
    def longest_prompt_tokens(self) -> int:
        return self.max_context_length - MAX_NEW_TOKENS


def make_cases(count: int, seed: int, limits: CaseLimits) -> list[Case]:
    """`count` cases: greedy and seeded, with and without speculation in turn, lengths from 1 to 1,000 tokens."""
    assert count >= 1, count
    assert limits.max_prompt_tokens >= 1, limits
    rng = random.Random(seed)
    lengths = _lengths(count, rng, limits)
    return [
        Case(number=number, prompt=_prompt(length, rng, limits.vocab_size), sampling=draw_sampling(number, rng, limits))
        for number, length in enumerate(lengths)
    ]


def _lengths(count: int, rng: random.Random, limits: CaseLimits) -> list[int]:
    """Edges of blocks and chunks first (half of the cases at most), the rest spread evenly over the magnitudes."""
    block, chunk, most = limits.block_size, limits.chunk_tokens, limits.max_prompt_tokens
    edges: Sequence[int] = [1, most, block + 1, block, chunk + 1, 2, chunk, block - 1, most - 1, chunk - 1, 2 * block]
    chosen = [length for length in dict.fromkeys(edges) if 1 <= length <= most][: max(1, count // 2)]
    spread = [round(math.exp(rng.uniform(0, math.log(most)))) for _ in range(count - len(chosen))]
    lengths = [*chosen, *spread]
    rng.shuffle(lengths)
    return lengths


def _prompt(length: int, rng: random.Random, vocab_size: int) -> Prompt:
    if length > 4 and rng.random() < TEXT_SHARE:
        text = ""
        while len((text + (word := rng.choice(WORDS))).encode()) < length:  # a token is a byte at least; BOS is one too
            text += f"{word} " if len((text + word).encode()) + 1 < length else word
        return TextPrompt(text=text or "a")
    return TokensPrompt(token_ids=tuple(rng.randrange(vocab_size) for _ in range(length)))


def draw_sampling(number: int, rng: random.Random, limits: CaseLimits) -> SamplingFields:
    greedy = number % 2 == 0
    speculates = number // 2 % 2 == 0 and limits.max_speculate > 0
    max_tokens = rng.choice((1, 2, 3)) if rng.random() < 0.1 else rng.randint(4, MAX_NEW_TOKENS)
    fields = SamplingFields(
        temperature=0.0 if greedy else rng.choice((0.5, 0.7, 1.0, 1.3)),
        top_p=1.0 if greedy else rng.choice((1.0, 0.95, 0.8)),
        top_k=-1 if greedy else rng.choice((-1, 40, 5)),
        seed=rng.getrandbits(64),
        max_tokens=max_tokens,
        ignore_eos=rng.random() >= EOS_SHARE,
        logprobs=rng.choice((0, 1, 5)),
        speculate=limits.max_speculate if speculates else 0,
    )
    return fields if rng.random() >= PROCESSED_SHARE else _processed(fields, max_tokens, rng, limits.vocab_size)


def _processed(fields: SamplingFields, max_tokens: int, rng: random.Random, vocab_size: int) -> SamplingFields:
    biased = rng.sample(range(vocab_size), k=min(vocab_size, rng.randint(0, MAX_BIASED_TOKENS)))
    return replace(
        fields,
        min_p=rng.choice((None, 0.02, 0.1)),
        repetition_penalty=rng.choice((None, 0.9, 1.3)),
        presence_penalty=rng.choice((None, -0.5, 1.0)),
        frequency_penalty=rng.choice((None, -0.5, 0.5)),
        logit_bias=tuple((token_id, rng.choice((-100.0, -2.0, 1.0, 4.0))) for token_id in biased),
        min_tokens=rng.choice((None, max_tokens // 2)),
    )
