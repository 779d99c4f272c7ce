"""Text to token ids and back, as the checkpoint's own files say; byte-level BPE, which all DeepSeek models use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from pd_engine.errors import InvalidArgument
from pd_engine.text.chat import ChatMessage, ChatTemplate, load_chat_template, special_token_strings
from pd_engine.text.control import ControlScanner, Escaper
from pd_engine.text.json_file import read_json_object

_PRINTABLE_BYTES = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


class Tokenizer:
    """Encodes prompts and chats, decodes ids. Threads may share one: nothing that shows changes after loading.

    Attributes:
        vocab_size: ids that the tokenizer knows; a model's embedding may have more rows, which decode to nothing.
        bos_token_id: None if the checkpoint names no BOS.
        eos_token_ids: that end a request, from generation_config.json, else config.json, else the tokenizer.
        max_token_chars: characters of the longest token, as it is written in tokenizer.json.
        adds_bos: whether a plain prompt gets the BOS unless the caller says otherwise.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = _load_tokenizer(path / "tokenizer.json")
        config = read_json_object(path / "tokenizer_config.json")
        special_tokens = special_token_strings(config, path)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(len(self._tokenizer.id_to_token(i) or "") for i in range(self.vocab_size))
        self.bos_token_id = self._id_of(special_tokens.get("bos_token"))
        self.eos_token_ids = _eos_token_ids(path, self._id_of(special_tokens.get("eos_token")))
        self.adds_bos = self._adds_bos(config, path)

        added = self._tokenizer.get_added_tokens_decoder()
        control_ids = {token.content: token_id for token_id, token in added.items()}
        self._hidden_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._scanner = ControlScanner(control_ids)
        self._escaper = Escaper(control_ids)
        self._token_bytes: list[bytes | None] = [None] * self.vocab_size
        _read_added_tokens_as_text(self._tokenizer, added.values())
        self.chat_template: ChatTemplate | None = load_chat_template(
            path, config=config, special_tokens=special_tokens, escaper=self._escaper
        )
        self._prompts_begin_with_bos = self.bos_token_id is not None and self._template_writes_bos()

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """The tokenizer of the checkpoint in folder `path`.

        Raises:
            InvalidArgument: a file is missing or broken, or it is not a byte-level BPE; the message names it.
        """
        return Tokenizer(path)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of a plain prompt.

        Args:
            parse_special: read special tokens in `text` as control; by default they are text like any other.
            add_bos: None: as the checkpoint says. A BOS that `text` already begins with is not doubled.

        Raises:
            InvalidArgument: `text` is not valid Unicode (lone surrogates).
        """
        ids = self._ids(self._scanner.split(text) if parse_special else [text])
        wanted = self.adds_bos if add_bos is None else add_bos
        if wanted and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def chat_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of the prompt that asks for the assistant's next turn. Contents are never read as control.

        Raises:
            InvalidArgument: no chat template, no messages, an unknown role, or text that is not valid Unicode.
        """
        if self.chat_template is None:
            raise InvalidArgument("this checkpoint has no chat template; send a plain prompt")
        rendered = self.chat_template.render(messages)
        return self._ids(
            run if isinstance(run, int) else self._escaper.unescape(run) for run in self._scanner.split(rendered)
        )

    def prompt_warnings(self, token_ids: Sequence[int]) -> list[str]:
        """What is unusual about a prompt: it lacks the BOS that the checkpoint's template (or tokenizer) writes."""
        if self._prompts_begin_with_bos and list(token_ids[:1]) != [self.bos_token_id]:
            return [
                f"the prompt does not begin with the BOS token {self.bos_token_id} that this checkpoint's prompts have"
            ]
        return []

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids; special tokens and ids outside the vocabulary are left out, bytes that are not
        UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, in UTF-8; b"" for special tokens and ids outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._token_bytes[token_id]
        if known is None:
            known = self._token_bytes[token_id] = self._make_token_bytes(token_id)
        return known

    def _make_token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden_ids:
            return b""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token, written as it is
            return str(token).encode()

    def _ids(self, runs: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        for run in runs:
            if isinstance(run, int):
                ids.append(run)
            else:
                ids += self._encode_plain(run)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"the text is not valid Unicode: {error.reason} at {error.start}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _id_of(self, token: str | None) -> int | None:
        token_id: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return token_id

    def _adds_bos(self, config: dict[str, Any], path: Path) -> bool:
        says = config.get("add_bos_token")
        if says is None:
            ids = self._tokenizer.encode("", add_special_tokens=True).ids
            return self.bos_token_id is not None and ids[:1] == [self.bos_token_id]
        if not isinstance(says, bool):
            file = path / "tokenizer_config.json"
            raise InvalidArgument(f"{file}: add_bos_token must be true or false, got {says!r}")
        return says

    def _template_writes_bos(self) -> bool:
        if self.chat_template is None or "user" not in self.chat_template.roles:
            return self.adds_bos
        return self.chat_ids([ChatMessage("user", "")])[:1] == [self.bos_token_id]


def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise InvalidArgument(f"{path} does not exist; a checkpoint needs its tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever is wrong in the file
        raise InvalidArgument(f"{path} is not a tokenizer: {error}") from None
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise InvalidArgument(f"{path} must be a byte-level BPE, but its decoder is {tokenizer.decoder!r}"[:500])
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word or not token.content:
            raise InvalidArgument(f"{path}: added token {token.content!r} strips or needs a whole word: not supported")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_added_tokens_as_text(tokenizer: tokenizers.Tokenizer, added: Iterable[tokenizers.AddedToken]) -> None:
    """From now on `encode` finds no added token; `ControlScanner` does that where it is wanted.

    The library can only skip those marked special, and DeepSeek-V3 marks <｜User｜> and the like as not special.
    """
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token.content, normalized=token.normalized, special=True) for token in added]
    )
    tokenizer.encode_special_tokens = True


def _eos_token_ids(path: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    for file in (path / "generation_config.json", path / "config.json"):
        value = read_json_object(file).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise InvalidArgument(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
        return tuple(ids)
    return () if of_tokenizer is None else (of_tokenizer,)


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level BPE token stands for (GPT-2's table): printable Latin-1 stands
    for itself, the other bytes for U+0100, U+0101, ... in order."""
    table = {chr(byte): byte for byte in _PRINTABLE_BYTES}
    others = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
