"""A checkpoint's chat template: Jinja in a sandbox, with the variables and helpers that Hugging Face gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pd_engine.errors import InvalidArgument
from pd_engine.text.control import EscapedText, Escaper
from pd_engine.text.json_file import read_json_object

KNOWN_ROLES = ("system", "user", "assistant")
_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. Special tokens in `content` are text."""

    role: str
    content: str


class ChatTemplate:
    """Renders messages to text in which control tokens are written only by the template.

    Attributes:
        roles: those of `KNOWN_ROLES` whose messages show up in a rendering.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], escaper: Escaper, path: Path) -> None:
        """`special_tokens`: the template's variables, such as {"bos_token": "<｜begin▁of▁sentence｜>"}.

        Raises:
            InvalidArgument: the template is broken; the message names `path`.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"the chat template in {path} is broken: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._escaper = escaper
        self.roles = tuple(role for role in KNOWN_ROLES if self._shows(role))

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt that asks for the assistant's next turn, its client-written characters escaped.

        Raises:
            InvalidArgument: no messages, a role that the template does not show, or the template refuses them.
        """
        if not messages:
            raise InvalidArgument("messages must not be empty")
        for message in messages:
            if message.role not in self.roles:
                raise InvalidArgument(f"role must be one of {', '.join(self.roles)}, got {message.role[:64]!r}")
        return self._render(messages)

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        turns = [{"role": m.role, "content": EscapedText(m.content, self._escaper)} for m in messages]
        try:
            return self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidArgument(f"the chat template refuses these messages: {error}") from None

    def _shows(self, role: str) -> bool:
        before = [ChatMessage("user", "")] if role == "assistant" else []
        after = [ChatMessage("user", "")] if role != "user" else []
        try:
            return _PROBE in self._render([*before, ChatMessage(role, _PROBE), *after])
        except InvalidArgument:
            return False


def load_chat_template(
    path: Path, *, config: Mapping[str, Any], special_tokens: Mapping[str, str], escaper: Escaper
) -> ChatTemplate | None:
    """The template of the checkpoint in folder `path`: `chat_template.jinja`, or the key in tokenizer_config.json
    (a string, or a list of named ones, of which "default" is taken), or None.

    Raises:
        InvalidArgument: the template is broken or not text.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            source: Any = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"cannot read {file}: {error}") from None
    else:
        file = path / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
        if source is None:
            raise InvalidArgument(f"{file} has no chat template named 'default', only {sorted(map(str, named))}")
    if source is None:
        return None
    if not isinstance(source, str):
        raise InvalidArgument(f"the chat template in {file} must be text, got {type(source).__name__}")
    return ChatTemplate(source, special_tokens=special_tokens, escaper=escaper, path=file)


def special_token_strings(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The `*_token` strings of tokenizer_config.json; each is written as a string or as an object with `content`.

    special_tokens_map.json is read beneath it, as older checkpoints have them only there.
    """
    merged = {**read_json_object(path / "special_tokens_map.json"), **config}
    strings = {}
    for key, value in merged.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            strings[key] = text
    return strings


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
