"""Sampling parameters of a request: the client's, over the checkpoint's defaults, over ours.

An absent field is None here and a default only in `resolve_sampling`. Ours: temperature 1, no limits and no penalties,
as many tokens as the context has room for, a seed from the request id, the server's speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pd_engine.errors import InvalidArgument, shown
from pd_engine.sampling.params import NO_TOP_K, LogitBias, SamplingParams, seed_from_request_id
from pd_engine.text.json_file import read_json_object

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFields:
    """What a client asked for; None is absent. Meanings and ranges as in `SamplingParams`; top_k 0 is no limit."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    speculate: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Sampling defaults that a checkpoint sets in generation_config.json; None where it sets none.

    `do_sample: false` means greedy and is read as temperature 0, whatever temperature stands beside it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @staticmethod
    def load(path: Path) -> GenerationDefaults:
        """Those of the checkpoint in folder `path`.

        Raises:
            InvalidArgument: the file is broken or a value is out of range.
        """
        file = path / "generation_config.json"
        config = read_json_object(file)
        defaults = GenerationDefaults(
            temperature=0.0 if config.get("do_sample") is False else _number(config, "temperature", file),
            top_p=_number(config, "top_p", file),
            top_k=_integer(config, "top_k", file),
            min_p=_number(config, "min_p", file),
            repetition_penalty=_number(config, "repetition_penalty", file),
        )
        try:
            _combine(SamplingFields(), defaults, max_tokens=1, seed=0)
        except InvalidArgument as error:
            raise InvalidArgument(f"{file}: {error.message}") from None
        return defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What a request must fit: tokens of context (prompt and generated), and ids of the model's vocabulary.

    `context_name` says in errors what sets the first limit.
    """

    max_context_length: int
    vocab_size: int
    context_name: str = "the context"


def check_num_tokens(num_tokens: int, limits: ModelLimits) -> None:
    """Raises:
    InvalidArgument: a prompt of so many leaves no room for one token.
    """
    if num_tokens >= limits.max_context_length:
        raise InvalidArgument(
            f"the prompt has {num_tokens} tokens; {limits.context_name} of {limits.max_context_length} tokens "
            f"allows {limits.max_context_length - 1} at most"
        )


def check_prompt(prompt_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raises:
    InvalidArgument: the prompt is empty, leaves no room for one token, or holds ids outside the vocabulary.
    """
    if not prompt_ids:
        raise InvalidArgument("the prompt must have at least one token")
    check_num_tokens(len(prompt_ids), limits)
    check_ids("prompt token ids", prompt_ids, limits.vocab_size)


def resolve_sampling(
    fields: SamplingFields,
    defaults: GenerationDefaults,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    request_id: str,
    default_max_tokens: int | None = None,
) -> SamplingParams:
    """The parameters of a request whose prompt has passed `check_prompt`.

    Args:
        default_max_tokens: of a request that names no max_tokens: so many, or min_tokens if that is more, as far as
            they fit. None: as many as fit.

    Raises:
        InvalidArgument: a value is out of range, or prompt and max_tokens together exceed the context.
    """
    room = limits.max_context_length - num_prompt_tokens
    assert room >= 1, (num_prompt_tokens, limits)
    if fields.max_tokens is not None and fields.max_tokens > room:
        raise InvalidArgument(
            f"max_tokens must be at most {room} after a prompt of {num_prompt_tokens} tokens, as {limits.context_name} "
            f"has {limits.max_context_length}, got {shown(fields.max_tokens)}"
        )
    check_ids("stop_token_ids", fields.stop_token_ids, limits.vocab_size)
    check_ids("token ids of logit_bias", [token for token, _ in fields.logit_bias], limits.vocab_size)
    max_tokens = fields.max_tokens
    return _combine(
        fields,
        defaults,
        max_tokens=_default_max_tokens(fields, default_max_tokens, room) if max_tokens is None else max_tokens,
        seed=seed_from_request_id(request_id) if fields.seed is None else fields.seed,
    )


def _default_max_tokens(fields: SamplingFields, default: int | None, room: int) -> int:
    return room if default is None else min(max(default, fields.min_tokens or 0), room)


def _combine(fields: SamplingFields, defaults: GenerationDefaults, *, max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        top_k=_first(fields.top_k, defaults.top_k, NO_TOP_K) or NO_TOP_K,
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_first(fields.presence_penalty, None, 0.0),
        frequency_penalty=_first(fields.frequency_penalty, None, 0.0),
        logit_bias=fields.logit_bias,
        min_tokens=fields.min_tokens or 0,
        seed=seed,
        max_tokens=max_tokens,
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.logprobs,
        speculate=fields.speculate,
    )


def _first(asked: T | None, default: T | None, ours: T) -> T:
    if asked is not None:
        return asked
    return ours if default is None else default


def check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises:
    InvalidArgument: one is outside the vocabulary.
    """
    if not token_ids:
        return
    worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
    if not 0 <= worst < vocab_size:
        raise InvalidArgument(f"{name} must be in [0, {vocab_size}), got {shown(worst)}")


def _number(config: dict[str, Any], key: str, file: Path) -> float | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InvalidArgument(f"{file}: {key} must be a number, got {shown(value)}")
    return value


def _integer(config: dict[str, Any], key: str, file: Path) -> int | None:
    value = _number(config, key, file)
    if isinstance(value, float) and not value.is_integer():  # as NaN and infinity are not
        raise InvalidArgument(f"{file}: {key} must be an integer, got {shown(value)}")
    return None if value is None else int(value)
