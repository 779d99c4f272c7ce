"""Bodies of /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pd_engine.errors import InvalidArgument
from pd_router.openai_body import Message, Strict
from pd_router.request import Prompt, TextPrompt


class TokenizeBody(Strict):
    """POST /tokenize: a text as completions read it, or a chat with its template."""

    model: str | None = Field(None, description="the served model's name; absent: that one")
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = Field(True, description="of a prompt: false: no BOS, true: as the tokenizer says")
    return_token_strs: bool | None = Field(None, description="also the text of each token")

    def to_tokenize(self) -> tuple[Prompt, bool]:
        """The prompt, and whether it is a chat.

        Raises:
            InvalidArgument: there is none, or there are two.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgument("prompt or messages is needed, one of them")
        if self.messages is not None:
            return tuple(message.turn(index) for index, message in enumerate(self.messages)), True
        return TextPrompt(text=self.prompt or "", add_bos=None if self.add_special_tokens else False), False


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = Field(None, description="the served model's name; absent: that one")
    tokens: Annotated[list[int], Field(fail_fast=True)]
