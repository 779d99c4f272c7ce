"""What `generate` and `submit` are asked for: read from the command line, checked, and turned into a request.

Both commands go through here, so that the same words mean the same request in one process and through a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pd_engine.contracts import api_pb2
from pd_engine.errors import InvalidArgument, shown
from pd_engine.priority import DEFAULT_PRIORITY, check_priority
from pd_engine.sampling.params import MAX_CHOICES, NO_TOP_K, SamplingParams
from pd_engine.settings import EngineSettings
from pd_engine.text.defaults import SamplingFields

MAX_TOKEN_ID = 2**32 - 1
MAX_PROMPT_BYTES = 16 * 2**20  # half of what a request may have
MAX_INT32 = 2**31 - 1
_VALID = SamplingParams(temperature=0.0, top_p=1.0, top_k=NO_TOP_K, seed=0, max_tokens=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    text: str
    parse_special: bool = False
    add_bos: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """One user's message, to which the checkpoint's chat template is applied."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokensPrompt


def read_sampling(
    *, max_tokens: int | None, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None,
    stop: Sequence[str], ignore_eos: bool, logprobs: int | None, speculate: int | None, min_p: float | None = None,
    repetition_penalty: float | None = None, presence_penalty: float | None = None,
    frequency_penalty: float | None = None, logit_bias: Sequence[str] = (), min_tokens: int | None = None,
) -> SamplingFields:
    """Sampling as it was asked for; None: not asked, so the server's or the checkpoint's default.

    Raises:
        InvalidArgument: a value is outside the range that `SamplingParams` allows, or its field in the protocol.
    """
    for text in stop:
        require_unicode(text, "a stop string")
    biases = tuple(parse_bias(text) for text in logit_bias)
    processing: dict[str, Any] = {
        "min_p": min_p, "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "min_tokens": min_tokens,
    }
    given = {
        "max_tokens": max(1, min_tokens or 1) if max_tokens is None else max_tokens, "temperature": temperature,
        "top_p": top_p, "top_k": top_k or None, "seed": seed, **processing,
    }
    replace(
        _VALID, stop=tuple(stop), logprobs=logprobs, speculate=speculate, logit_bias=biases, **_present(given)
    )
    for name, value in (("max_tokens", max_tokens), ("min_tokens", min_tokens), ("top_k", top_k)):
        if value is not None and value > MAX_INT32:
            raise InvalidArgument(f"{name} must be at most {MAX_INT32}, got {shown(value)}")
    return SamplingFields(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop),
        ignore_eos=ignore_eos or None, logprobs=logprobs, speculate=speculate, logit_bias=biases, **processing,
    )


def read_num_choices(n: int) -> int:
    """Raises:
    InvalidArgument: so many cannot be asked for.
    """
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidArgument(f"-n must be in [1, {MAX_CHOICES}], got {shown(n)}")
    return n


def parse_bias(text: str) -> tuple[int, float]:
    """(token id, bias) of "12=-5".

    Raises:
        InvalidArgument: it is anything else.
    """
    token, separator, bias = text.partition("=")
    try:
        if separator and token.isascii() and token.isdigit() and int(token) <= MAX_TOKEN_ID:
            return int(token), float(bias)
    except ValueError:
        pass
    raise InvalidArgument(f"--logit-bias must be a token id and a number such as 12=-5, got {text[:40]!r}")


def sampling_proto(fields: SamplingFields) -> api_pb2.SamplingParams:
    """Fields that were not asked for stay absent."""
    return api_pb2.SamplingParams(
        temperature=fields.temperature, top_p=fields.top_p, top_k=fields.top_k, max_tokens=fields.max_tokens,
        stop=fields.stop, stop_token_ids=fields.stop_token_ids, ignore_eos=fields.ignore_eos, seed=fields.seed,
        logprobs=fields.logprobs, speculate=fields.speculate, min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty, presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty, logit_bias=dict(fields.logit_bias), min_tokens=fields.min_tokens,
    )


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def read_prompt(
    *, prompt: str | None, prompt_file: Path | None, token_ids: str | None, chat: bool, add_bos: bool | None,
    parse_special: bool,
) -> Prompt:
    """The prompt, from the one place that was named.

    Raises:
        InvalidArgument: none or several were named, it is empty, no UTF-8, or not made of token ids.
    """
    given = [name for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--token-ids", token_ids))
             if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidArgument(f"give one of --prompt, --prompt-file and --token-ids, got {found}")
    if chat and (add_bos is not None or parse_special):
        raise InvalidArgument("--chat applies the chat template, which --add-bos and --parse-special do not change")
    if token_ids is not None:
        if chat or add_bos is not None or parse_special:
            raise InvalidArgument("--token-ids takes none of --chat, --add-bos and --parse-special")
        return TokensPrompt(token_ids=parse_token_ids(token_ids))
    text = require_unicode(prompt, "the prompt") if prompt is not None else _read_text(prompt_file or Path("-"))
    if not text:
        raise InvalidArgument("the prompt is empty")
    return ChatPrompt(text=text) if chat else TextPrompt(text=text, parse_special=parse_special, add_bos=add_bos)


def parse_token_ids(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3"; spaces are allowed.

    Raises:
        InvalidArgument: there are none, or one is no number or too large.
    """
    ids = []
    for part in text.split(","):
        word = part.strip()
        digits = word.lstrip("0") or "0"
        is_number = word.isascii() and word.isdigit()
        if not is_number or len(digits) > len(str(MAX_TOKEN_ID)) or int(digits) > MAX_TOKEN_ID:
            raise InvalidArgument(
                f"--token-ids must be numbers from 0 to {MAX_TOKEN_ID} such as 1,2,3, got {word[:40]!r}"
            )
        ids.append(int(digits))
    return tuple(ids)


def read_dtype(dtype: str | None) -> str | None:
    """The dtype that a cluster must serve; None: any.

    Raises:
        InvalidArgument: there is no such dtype.
    """
    allowed = get_args(EngineSettings.model_fields["dtype"].annotation)
    if dtype is not None and dtype not in allowed:
        raise InvalidArgument(f"--dtype must be one of {', '.join(allowed)}, got {dtype!r}")
    return None if dtype == "auto" else dtype


def require_unicode(text: str, what: str) -> str:
    """Raises:
    InvalidArgument: the command line was not UTF-8 (Python keeps such bytes as lone surrogates).
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is not UTF-8 at character {error.start}") from None
    return text


def _read_text(path: Path) -> str:
    name = "standard input" if path == Path("-") else str(path)
    try:
        if path == Path("-"):
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"cannot read the prompt from {name}: {error.strerror}") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise InvalidArgument(f"the prompt in {name} is larger than {MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the prompt in {name} is not UTF-8 at byte {error.start}") from None


def to_request(
    prompt: Prompt, sampling: SamplingFields, *, request_id: str = "", stream: bool = True,
    placement: api_pb2.Placement | None = None, priority: int = DEFAULT_PRIORITY, num_choices: int = 1,
    cache_salt: str = "",
) -> api_pb2.GenerateRequest:
    """The request that asks a router for this.

    Raises:
        InvalidArgument: the priority is outside its range.
    """
    request = api_pb2.GenerateRequest(
        request_id=request_id, sampling_params=sampling_proto(sampling), stream=stream, placement=placement,
        priority=check_priority(priority), cache_salt=cache_salt,
    )
    if num_choices != 1:
        request.sampling_params.n = num_choices
    match prompt:
        case TokensPrompt():
            request.tokenized.input_ids.extend(prompt.token_ids)
        case ChatPrompt():
            request.chat.messages.add(role="user", content=prompt.text)
        case TextPrompt():
            request.text = prompt.text
            request.parse_special_tokens = prompt.parse_special
            if prompt.add_bos is not None:
                request.add_bos = prompt.add_bos
    return request
