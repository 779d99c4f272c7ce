"""Bodies of OpenAI's completions and chat completions, parsed once: unknown fields are refused by name.

Beyond OpenAI's own fields there are vLLM's `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`,
`ignore_eos`, `request_id`, `cache_salt`, `priority`, `return_token_ids`, and ours: `speculate`, `ttft_target_ms`,
`itl_target_ms`, `resumable`, `resume_from`, `resume_output_ids`.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pd_engine.errors import InvalidArgument, shown
from pd_engine.priority import DEFAULT_PRIORITY
from pd_engine.sampling.params import MAX_CHOICES, MAX_LOGIT_BIAS, LogitBias
from pd_engine.text.chat import ChatMessage
from pd_engine.text.defaults import SamplingFields
from pd_router.request import Prompt, RawRequest, TextPrompt

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents it; chats go on to the end of the context
MAX_LISTED_PROBLEMS = 5
MAX_ID_DIGITS = 10

# Fields of OpenAI's and vLLM's that change nothing with these values, and are not supported with others.
NEUTRAL_VALUES: dict[str, list[Any]] = {
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "tools": [[]],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "reasoning_effort": [],
    "verbosity": [],
    "web_search_options": [],
    "prompt_cache_key": [],
    "safety_identifier": [],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}],
    "store": [False],
    "metadata": [{}],
    "service_tier": ["auto", "default"],
    "skip_special_tokens": [True],
}

Body = TypeVar("Body", bound="Strict")


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="with include_usage: in every chunk, as far as it is")
    include_obfuscation: Literal[False] | None = None


class OpenAIBody(Strict):
    """What both kinds have."""

    model: str | None = Field(None, description="the served model's name; absent: that one")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = Field(None, description="token id -> what is added to its logit")
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    speculate: int | None = None
    n: int | None = Field(None, description="choices of each prompt")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="whose request it is: users share the room fairly")
    request_id: str | None = None
    cache_salt: str | None = None
    resumable: bool | None = Field(None, description="it runs on for a while when its client is gone")
    resume_from: int | Annotated[list[int], Field(fail_fast=True)] | None = Field(
        None, description="how many tokens of each choice the client has; its stream begins after them"
    )
    resume_output_ids: Any = Field(
        None, description="in place of resume_from, these tokens: a list of ids, or one for each choice"
    )
    priority: int | None = Field(None, description="lower ones are served earlier")
    ttft_target_ms: int | None = Field(None, description="refused at once if its first token would come later")
    itl_target_ms: int | None = Field(None, description="no worker takes it that could not keep this pace")
    return_token_ids: bool | None = Field(None, description="choices carry token_ids, the first prompt_token_ids")

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingFields:
        """Raises:
        InvalidArgument: options that do not go together, or a bias that is none.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options is only for stream: true")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_parse_logit_bias(self.logit_bias or {}),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            speculate=self.speculate,
        )


    def raw_request(
        self, *, prompts: tuple[Prompt, ...], is_chat: bool, sampling: SamplingFields, default_max_tokens: int | None
    ) -> RawRequest:
        """Raises:
        InvalidArgument: resume_from or resume_output_ids without a stream, or the latter of another shape.
        """
        if (self.resume_from is not None or self.resume_output_ids is not None) and not self.stream:
            raise InvalidArgument("resume_from and resume_output_ids are only for stream: true")
        resume_from = [self.resume_from] if isinstance(self.resume_from, int) else self.resume_from or []
        return RawRequest(
            prompts=prompts,
            is_chat=is_chat,
            num_choices=1 if self.n is None else self.n,
            sampling=sampling,
            default_max_tokens=default_max_tokens,
            request_id=self.request_id or "",
            cache_salt=self.cache_salt or "",
            priority=DEFAULT_PRIORITY if self.priority is None else self.priority,
            user=self.user or "",
            ttft_target_ms=self.ttft_target_ms,
            itl_target_ms=self.itl_target_ms,
            resumable=bool(self.resumable),
            resume_from=tuple(resume_from),
            resume_output_ids=_parse_output_ids(self.resume_output_ids),
        )


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Any = Field(description="text, token ids, or a list of such prompts")
    logprobs: int | None = Field(None, description="how many of the most likely tokens to report")

    def request(self) -> RawRequest:
        """Raises:
        InvalidArgument: the prompt is of no known shape, or an option is not supported.
        """
        return self.raw_request(
            prompts=_parse_prompts(self.prompt),
            is_chat=False,
            sampling=self.sampling(max_tokens=self.max_tokens, logprobs=self.logprobs),
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        )


Empty = Annotated[list[Any], Field(max_length=0)]


class Message(Strict):
    """An answer may be sent back as it came, with what is null or empty in it."""

    role: str
    content: Any = Field(description="text, or a list of parts of type text")
    name: str | None = Field(None, description="taken and not used")
    refusal: None = None
    annotations: Empty | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Empty | None = None

    def turn(self, index: int) -> ChatMessage:
        return ChatMessage(self.role, _parse_content(self.content, f"messages.{index}.content"))


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def request(self) -> RawRequest:
        """Raises:
        InvalidArgument: a message has no text, or an option is not supported.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument("top_logprobs is only for logprobs: true")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.raw_request(
            prompts=(tuple(message.turn(index) for index, message in enumerate(self.messages)),),
            is_chat=True,
            sampling=self.sampling(max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None),
            default_max_tokens=None,
        )


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Raises:
    InvalidArgument: it is not JSON in UTF-8, or fields are unknown, missing or of another type; all are named.
    """
    try:
        loose = _Loose.model_validate_json(data)
    except ValidationError as error:
        raise InvalidArgument(f"the body must be a JSON object in UTF-8: {shown(error.errors()[0]['msg'])}") from None
    fields = dict(loose.model_extra or {})
    for name, allowed in NEUTRAL_VALUES.items():
        if name in fields and name not in kind.model_fields:
            value = fields.pop(name)
            if value is not None and not _is_one_of(value, allowed):
                raise InvalidArgument(f"{name} is not supported, only its default; got {shown(value)}")
    for name in [name for name in fields if name not in kind.model_fields][MAX_LISTED_PROBLEMS:]:
        del fields[name]  # each would cost an error of its own
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = error.errors()[:MAX_LISTED_PROBLEMS]
        raise InvalidArgument("; ".join(_explain(kind, problem) for problem in problems)) from None


def _is_one_of(value: Any, allowed: list[Any]) -> bool:
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


def _explain(kind: type[BaseModel], problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    name = shown(".".join(path))
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], kind.model_fields, n=1) if len(path) == 1 else []
        return f"unknown field {name}" + (f"; did you mean {close[0]}?" if close else "")
    if problem["type"] == "missing":
        return f"{name} is missing"
    return f"{name}: {problem['msg']}, got {shown(problem['input'])}"


def _parse_logit_bias(logit_bias: dict[str, Any]) -> LogitBias:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument(f"logit_bias has at most {MAX_LOGIT_BIAS} tokens, got {len(logit_bias)}")
    for key, bias in logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise InvalidArgument(f"logit_bias must have token ids as keys, such as \"12\", got {shown(key)}")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise InvalidArgument(f"logit_bias must have numbers as values, got {shown(bias)} for token {key}")
    return tuple(sorted((int(key), bias) for key, bias in logit_bias.items()))


def _parse_prompts(prompt: Any) -> tuple[Prompt, ...]:
    if not (isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt)):
        return (_parse_prompt(prompt),)
    if len(prompt) > MAX_CHOICES:
        raise InvalidArgument(f"at most {MAX_CHOICES} prompts are allowed, got {len(prompt)}")
    return tuple(_parse_prompt(item) for item in prompt)


def _parse_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return tuple(prompt)
    raise InvalidArgument(f"prompt must be text or a list of token ids, and not empty, got {shown(prompt)}")


def _parse_output_ids(output_ids: Any) -> tuple[tuple[int, ...], ...]:
    if output_ids is None:
        return ()
    is_flat = isinstance(output_ids, list) and all(type(item) is int for item in output_ids)
    lists = [output_ids] if is_flat else output_ids
    if not isinstance(lists, list) or not all(
        isinstance(choice, list) and all(type(item) is int for item in choice) for choice in lists
    ):
        raise InvalidArgument(
            f"resume_output_ids must be a list of token ids, or such a list for each choice, got {shown(output_ids)}"
        )
    return tuple(map(tuple, lists))


def _parse_content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_parse_part(part, f"{name}.{index}") for index, part in enumerate(content))
    raise InvalidArgument(f"{name} must be text or a list of parts of type text, got {shown(content)}")


def _parse_part(part: Any, name: str) -> str:
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
        text = part["text"]
        if isinstance(text, str):
            return text
    raise InvalidArgument(f'{name} must be {{"type": "text", "text": ...}}, got {shown(part)}')
