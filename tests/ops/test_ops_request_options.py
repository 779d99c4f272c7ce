"""Prompts and sampling from the command line: what is refused, and what is sent."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from pd_engine.errors import InvalidArgument
from pd_engine.text.defaults import SamplingFields
from pd_ops.request_options import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    parse_token_ids,
    read_prompt,
    read_sampling,
    to_request,
)


def prompt_of(
    *, prompt: str | None = None, prompt_file: Path | None = None, token_ids: str | None = None, chat: bool = False,
    add_bos: bool | None = None, parse_special: bool = False,
) -> Prompt:
    return read_prompt(
        prompt=prompt, prompt_file=prompt_file, token_ids=token_ids, chat=chat, add_bos=add_bos,
        parse_special=parse_special,
    )


def sampling_of(**given: object) -> SamplingFields:
    absent: dict[str, object] = dict.fromkeys(
        ("max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "speculate")
    )
    return read_sampling(**{**absent, "stop": [], "ignore_eos": False, **given})  # type: ignore[arg-type]


class TestPrompt:
    def test_text(self) -> None:
        assert prompt_of(prompt="hi", add_bos=True) == TextPrompt(text="hi", add_bos=True)

    def test_chat(self) -> None:
        assert prompt_of(prompt="hi", chat=True) == ChatPrompt(text="hi")

    def test_token_ids(self) -> None:
        assert prompt_of(token_ids=" 1, 2,3") == TokensPrompt(token_ids=(1, 2, 3))

    def test_file(self, tmp_path: Path) -> None:
        file = tmp_path / "prompt.txt"
        file.write_bytes("naïve\n".encode())
        assert prompt_of(prompt_file=file) == TextPrompt(text="naïve\n")

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
        assert prompt_of(prompt_file=Path("-")) == TextPrompt(text="from a pipe")

    def test_file_that_is_no_utf8(self, tmp_path: Path) -> None:
        file = tmp_path / "prompt.txt"
        file.write_bytes(b"abc\xff")
        with pytest.raises(InvalidArgument, match="not UTF-8 at byte 3"):
            prompt_of(prompt_file=file)

    def test_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="No such file"):
            prompt_of(prompt_file=tmp_path / "nothing")

    def test_argument_that_is_no_utf8(self) -> None:
        with pytest.raises(InvalidArgument, match="the prompt is not UTF-8 at character 1"):
            prompt_of(prompt=b"a\xff".decode("utf-8", "surrogateescape"))

    @pytest.mark.parametrize("given", [{}, {"prompt": "a", "token_ids": "1"}, {"prompt": ""}])
    def test_none_two_or_empty(self, given: dict[str, str]) -> None:
        with pytest.raises(InvalidArgument):
            prompt_of(prompt=given.get("prompt"), token_ids=given.get("token_ids"))

    @pytest.mark.parametrize("extra", [{"chat": True}, {"add_bos": False}, {"parse_special": True}])
    def test_token_ids_take_no_text_options(self, extra: dict[str, bool]) -> None:
        with pytest.raises(InvalidArgument, match="--token-ids takes none"):
            prompt_of(token_ids="1", **extra)

    @pytest.mark.parametrize("text", ["", "1,", "1,,2", "a", "-1", "1.5", "4294967296", "٣"])
    def test_bad_token_ids(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="--token-ids must be numbers"):
            parse_token_ids(text)


class TestSampling:
    def test_what_was_not_asked_for_stays_absent(self) -> None:
        request = to_request(TextPrompt(text="hi"), sampling_of())
        assert [field.name for field, _ in request.sampling_params.ListFields()] == []
        assert not request.HasField("add_bos")

    def test_everything(self) -> None:
        fields = sampling_of(
            max_tokens=3, temperature=0.0, top_p=0.5, top_k=0, seed=2**64 - 1, stop=["a", "b"], ignore_eos=True,
            logprobs=0, speculate=0, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-2.0,
            logit_bias=["12=-5", "3=0.5"], min_tokens=2,
        )
        params = to_request(TokensPrompt(token_ids=(5, 6)), fields).sampling_params
        assert params.HasField("temperature")
        assert params.HasField("logprobs")
        assert params.HasField("speculate")
        assert (params.max_tokens, params.top_p, params.top_k, params.seed) == (3, 0.5, 0, 2**64 - 1)
        assert (list(params.stop), params.ignore_eos) == (["a", "b"], True)
        assert (params.min_p, params.repetition_penalty, params.min_tokens) == (0.25, 1.5, 2)
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -2.0)
        assert dict(params.logit_bias) == {12: -5.0, 3: 0.5}

    def test_min_tokens_alone(self) -> None:
        assert sampling_of(min_tokens=50).min_tokens == 50

    @pytest.mark.parametrize("text", ["", "12", "12=", "=5", "-1=5", "a=5", "12=b", "4294967296=1", "١=1"])
    def test_bad_bias(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="--logit-bias must be a token id and a number such as 12=-5"):
            sampling_of(logit_bias=[text])

    @pytest.mark.parametrize("texts", [["1=nan"], ["1=inf"], ["1=100.1"], ["1=1", "1=2"]])
    def test_bias_out_of_range(self, texts: list[str]) -> None:
        with pytest.raises(InvalidArgument, match="logit_bias must"):
            sampling_of(logit_bias=texts)

    @pytest.mark.parametrize(("name", "value"), [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", 1e39),
        ("top_p", 0.0), ("top_p", 1.5), ("top_p", math.nan), ("top_k", -2), ("top_k", 2**31),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("seed", -1), ("seed", 2**64),
        ("logprobs", -1), ("logprobs", 21), ("speculate", -1), ("speculate", 9), ("min_p", -0.1), ("min_p", math.nan),
        ("repetition_penalty", 0.0), ("repetition_penalty", math.inf), ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan), ("min_tokens", -1), ("min_tokens", 2**31),
    ])
    def test_out_of_range(self, name: str, value: float) -> None:
        with pytest.raises(InvalidArgument, match=name):
            sampling_of(**{name: value})

    @pytest.mark.parametrize("sign", ["", "-"])
    @pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "seed", "logprobs", "speculate"])
    def test_a_number_beyond_all_ranges(self, name: str, sign: str) -> None:
        """Its digits do not come back; of real numbers Python makes infinities before they are seen here."""
        with pytest.raises(InvalidArgument, match=name) as caught:
            sampling_of(**{name: int(f"{sign}1{'0' * 400}")})
        assert len(caught.value.message) < 250
        with pytest.raises(InvalidArgument, match="logit_bias must be in"):
            sampling_of(logit_bias=[f"1={sign}1{'0' * 400}"])

    def test_stop_strings(self) -> None:
        with pytest.raises(InvalidArgument, match="stop string"):
            sampling_of(stop=[""])
        with pytest.raises(InvalidArgument, match="not UTF-8"):
            sampling_of(stop=["\udcff"])


def test_requests() -> None:
    text = to_request(TextPrompt(text="hi", parse_special=True, add_bos=False), sampling_of(), stream=False)
    assert (text.text, text.parse_special_tokens, text.HasField("add_bos"), text.add_bos) == ("hi", True, True, False)
    assert not text.stream
    chat = to_request(ChatPrompt(text="hi"), sampling_of())
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "hi")]
    assert list(to_request(TokensPrompt(token_ids=(7,)), sampling_of()).tokenized.input_ids) == [7]
    assert to_request(ChatPrompt(text="hi"), sampling_of(), priority=-4).priority == -4
    with pytest.raises(InvalidArgument, match="priority must be in"):
        to_request(ChatPrompt(text="hi"), sampling_of(), priority=2**70)
