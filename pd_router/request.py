"""A request as the doors hand it on: checked, tokenized, its sampling fixed, one part for each of its choices."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pd_engine.errors import InvalidArgument, shown
from pd_engine.priority import DEFAULT_PRIORITY, check_priority
from pd_engine.sampling.params import MAX_CHOICES, SamplingParams, seed_of_choice
from pd_engine.text.chat import ChatMessage
from pd_engine.text.defaults import (
    GenerationDefaults,
    ModelLimits,
    SamplingFields,
    check_ids,
    check_num_tokens,
    check_prompt,
    resolve_sampling,
)
from pd_engine.text.tokenizer import Tokenizer
from pd_router.callers import ANYONE, Caller

MAX_REQUEST_ID_CHARS = 128
MAX_SALT_CHARS = 256
MAX_USER_CHARS = 256
MAX_TARGET_MS = 86_400_000  # a day
MAX_MESSAGES = 4096
MAX_CHARS_INLINE = 4_000  # longer texts are tokenized in a thread: about 2 ms of the event loop
_REQUEST_ID = re.compile(r"[\x21-\x7e]+")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementWish:
    """For verification and drills; the default places freely."""

    prefill_worker: str = ""
    decode_worker: str = ""
    bypass_prefix_cache: bool = False
    report_block_checksums: bool = False
    report_placement: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    """A completion's prompt. `parse_special`: special tokens in it are control; `add_bos` None: as the checkpoint."""

    text: str
    parse_special: bool = False
    add_bos: bool | None = None


Prompt = TextPrompt | tuple[ChatMessage, ...] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRequest:
    """What a client asked for: `num_choices` of each prompt. An empty `request_id` gets a random one.

    Attributes:
        default_max_tokens: its door's, for a request that names no max_tokens (`resolve_sampling`).
        resumable: it goes on for a while when its client is gone, so that the client can come back for it.
        resume_from: of each choice, how many tokens the client has; none: of none any.
        resume_output_ids: in its place, these tokens.
    """

    prompts: tuple[Prompt, ...]
    is_chat: bool = False
    num_choices: int = 1
    sampling: SamplingFields = field(default_factory=SamplingFields)
    default_max_tokens: int | None = None
    request_id: str = ""
    placement: PlacementWish = PlacementWish()
    cache_salt: str = ""
    priority: int = DEFAULT_PRIORITY
    user: str = ""
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    resumable: bool = False
    resume_from: tuple[int, ...] = ()
    resume_output_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a journey runs: one choice, number `choice` of its request.

    Attributes:
        priority: lower ones go first.
        tenant: who shares room with others fairly.
        ttft_target_ms, itl_target_ms: within which it wants to be served; None: as the server has it.
    """

    request_id: str
    choice: int = 0
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    ending_ids: frozenset[int]
    placement: PlacementWish
    cache_salt: str
    priority: int = DEFAULT_PRIORITY
    tenant: str = ""
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """All that a client asked for at once: its choices in order, those of one prompt side by side.

    Attributes:
        payload: a digest of what was asked for, the same for the same request sent again; empty if the client gave it
            no id.
        resumable: as in `RawRequest`.
        resume_from: tokens of each choice that the client has.
        resume_output_ids: and which they are; none: it has not said.
        tokenize_s: seconds that its prompts took to be made of token ids.
    """

    request_id: str
    choices: tuple[Request, ...]
    num_prompts: int
    payload: bytes
    resumable: bool
    resume_from: tuple[int, ...]
    resume_output_ids: tuple[tuple[int, ...], ...]
    tokenize_s: float = 0.0

    def replayed(self, choice: int) -> tuple[int, ...]:
        """Tokens after which the choice can go on. None where logprobs are asked for: these have to be computed."""
        if not self.resume_output_ids or self.choices[choice].params.logprobs is not None:
            return ()
        return self.resume_output_ids[choice]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first choice of each prompt."""
        return tuple(range(0, len(self.choices), len(self.choices) // self.num_prompts))


class Preparer:
    """Makes requests of what clients send. Every error is InvalidArgument and names the field."""

    def __init__(self, tokenizer: Tokenizer, defaults: GenerationDefaults, limits: Callable[[], ModelLimits]) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._limits = limits

    async def prepare(self, raw: RawRequest, caller: Caller = ANYONE) -> Submission:
        """Args:
            caller: whose API key came with it, if keys are needed: then it is the user, whatever the request says, and
                shares cached blocks with nobody who may not have them, whatever the salt.

        Raises:
            InvalidArgument: something in the request is out of range, malformed or too long.
        """
        if caller.name:
            raw = replace(raw, user=caller.name)
        request_id = _check_request_id(raw.request_id) if raw.request_id else new_request_id()
        if len(raw.cache_salt) > MAX_SALT_CHARS:
            raise InvalidArgument(f"cache_salt has at most {MAX_SALT_CHARS} characters, got {len(raw.cache_salt)}")
        check_priority(raw.priority)
        caller.check_priority(raw.priority)
        if len(raw.user) > MAX_USER_CHARS:
            raise InvalidArgument(f"user has at most {MAX_USER_CHARS} characters, got {len(raw.user)}")
        for name, target_ms in (("ttft_target_ms", raw.ttft_target_ms), ("itl_target_ms", raw.itl_target_ms)):
            if target_ms is not None and not 1 <= target_ms <= MAX_TARGET_MS:
                raise InvalidArgument(f"{name} must be from 1 to {MAX_TARGET_MS}, got {shown(target_ms)}")
        _check_num_choices(raw.num_choices, len(raw.prompts))
        choices: list[Request] = []
        tokenize_s = 0.0
        for number, prompt in enumerate(raw.prompts):
            await asyncio.sleep(0)  # the others' turn, where many prompts are tokenized
            prompt_ids, seconds = await self._tokenized(prompt, is_chat=raw.is_chat)
            tokenize_s += seconds
            first = self._first_choice(raw, prompt_ids, number, request_id, caller)
            for c in range(raw.num_choices):
                params = replace(first.params, seed=seed_of_choice(first.params.seed, c))
                choices.append(replace(first, choice=len(choices), params=params))
        resume_output_ids, resume_from = _check_resume(raw, choices, vocab_size=self._limits().vocab_size)
        return Submission(
            request_id=request_id,
            choices=tuple(choices),
            num_prompts=len(raw.prompts),
            payload=_digest(raw) if raw.request_id else b"",
            resumable=raw.resumable,
            resume_from=resume_from,
            resume_output_ids=resume_output_ids,
            tokenize_s=tokenize_s,
        )

    def _first_choice(
        self, raw: RawRequest, prompt_ids: list[int], number: int, request_id: str, caller: Caller
    ) -> Request:
        limits = self._limits()
        check_prompt(prompt_ids, limits)
        params = resolve_sampling(
            raw.sampling, self._defaults, limits, num_prompt_tokens=len(prompt_ids),
            # Equal prompts without a seed are to differ; no request id has a blank.
            request_id=f"{request_id} {number}" if number else request_id,
            default_max_tokens=raw.default_max_tokens,
        )
        return Request(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            # A checkpoint may name eos ids that its model has no row for: they never come, and workers refuse them.
            ending_ids=frozenset(i for i in params.ending_ids(self._tokenizer.eos_token_ids) if i < limits.vocab_size),
            placement=raw.placement,
            cache_salt=caller.salt(raw.cache_salt),
            priority=raw.priority,
            tenant=raw.user or raw.cache_salt,
            ttft_target_ms=raw.ttft_target_ms,
            itl_target_ms=raw.itl_target_ms,
            warnings=tuple(self._tokenizer.prompt_warnings(prompt_ids)),
        )

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raises:
        InvalidArgument: a prompt of so many leaves no room for one token.
        """
        check_num_tokens(num_tokens, self._limits())

    async def tokenize(self, prompt: Prompt, *, is_chat: bool) -> list[int]:
        """Raises:
        InvalidArgument: an empty prompt, one that is surely too long, or text that cannot be tokenized.
        """
        return (await self._tokenized(prompt, is_chat=is_chat))[0]

    async def _tokenized(self, prompt: Prompt, *, is_chat: bool) -> tuple[list[int], float]:
        """(ids, seconds that it took)."""
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise InvalidArgument("the prompt must not be empty")
            self._check_num_chars(len(prompt.text))
            text, special, bos = prompt.text, prompt.parse_special, prompt.add_bos
            return await _off_loop(
                lambda: self._tokenizer.encode(text, parse_special=special, add_bos=bos), len(prompt.text)
            )
        if not is_chat:
            return [token for token in prompt if isinstance(token, int)], 0.0
        messages = [message for message in prompt if isinstance(message, ChatMessage)]
        if len(messages) > MAX_MESSAGES:
            raise InvalidArgument(f"at most {MAX_MESSAGES} messages are allowed, got {len(messages)}")
        num_chars = sum(len(message.content) for message in messages)
        self._check_num_chars(num_chars)
        return await _off_loop(lambda: self._tokenizer.chat_ids(messages), num_chars)

    def _check_num_chars(self, num_chars: int) -> None:
        """Before time is spent on it: no token has more characters than the longest of the vocabulary."""
        max_chars = self._limits().max_context_length * self._tokenizer.max_token_chars
        if num_chars > max_chars:
            raise InvalidArgument(
                f"the prompt has {num_chars} characters; the context of {self._limits().max_context_length} tokens "
                f"cannot hold more than {max_chars}"
            )


def new_request_id() -> str:
    return secrets.token_hex(16)


def _check_num_choices(num_choices: int, num_prompts: int) -> None:
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidArgument(f"n must be in [1, {MAX_CHOICES}], got {shown(num_choices)}")
    if num_choices * num_prompts > MAX_CHOICES:
        raise InvalidArgument(
            f"a request has at most {MAX_CHOICES} choices, got {num_prompts} prompts with {num_choices} each"
        )


def _check_request_id(request_id: str) -> str:
    if len(request_id) > MAX_REQUEST_ID_CHARS or not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument(
            f"request_id must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters without blanks, "
            f"got {request_id[:64]!r}"
        )
    return request_id


def _check_resume(
    raw: RawRequest, choices: Sequence[Request], *, vocab_size: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """(which tokens the client has, if it says so; how many), each by choice."""
    if not raw.request_id and (raw.resumable or raw.resume_from or raw.resume_output_ids):
        raise InvalidArgument("resumable, resume_from and resume_output_ids are for a request with a request_id")
    if raw.resume_from and raw.resume_output_ids:
        raise InvalidArgument("resume_output_ids stand in place of resume_from: give one of them")
    for token_ids in raw.resume_output_ids:
        check_ids("resume_output_ids", token_ids, vocab_size)
    name = "resume_output_ids" if raw.resume_output_ids else "resume_from"
    resume_from = tuple(map(len, raw.resume_output_ids)) or raw.resume_from or (0,) * len(choices)
    if len(resume_from) != len(choices):
        raise InvalidArgument(f"{name} must have one for each of the {len(choices)} choices, got {len(resume_from)}")
    for choice, index in zip(choices, resume_from, strict=True):
        if not 0 <= index <= choice.params.max_tokens:
            raise InvalidArgument(
                f"{name}: tokens of a choice are in [0, {choice.params.max_tokens}], its max_tokens, got {shown(index)}"
            )
    return raw.resume_output_ids, resume_from


def _digest(raw: RawRequest) -> bytes:
    """Of what was asked for, not of how it is read."""
    asked = replace(raw, resumable=False, resume_from=(), resume_output_ids=())
    return hashlib.blake2b(repr(asked).encode(), digest_size=16).digest()


async def _off_loop(work: Callable[[], T], num_chars: int) -> tuple[T, float]:
    """(its result, the seconds that it took)."""
    def timed() -> tuple[T, float]:
        begun_s = time.perf_counter()
        return work(), time.perf_counter() - begun_s

    return timed() if num_chars <= MAX_CHARS_INLINE else await asyncio.to_thread(timed)
