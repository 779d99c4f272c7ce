"""From reStructuredText to token ids: the parts of the demo checkpoint's recipe that touch text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pd_engine.errors import InvalidArgument
from pd_engine.text.chat import ChatMessage
from pd_engine.text.tokenizer import Tokenizer
from pd_ops.demo_model.corpus import HELD_OUT_EVERY, encode, read_documents, split, windows
from pd_ops.demo_model.prose import documents, is_prose, paragraphs
from pd_ops.demo_model.shape import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID, Shape
from pd_ops.demo_model.vocabulary import SPECIAL_TOKENS, train_tokenizer, write_tokenizer
from support.checkout import ROOT

SOURCE = """\
.. _top:

Reading files
=============

.. function:: open(path, mode='r')
   :noindex:

   Opens the file *path* and returns a :class:`~io.TextIOWrapper`; see :ref:`the guide <guide>` for
   what ``mode`` may be.

   .. versionchanged:: 3.9
      Accepts a path that is `not a string`_, as other functions of this module do already.

   For example, this code prints every line of a file that may be very long indeed::

      for line in open("x"):
          print(line)

   .. code-block:: python

      this_code("goes away, even though it is a long line that ends like a sentence.")

* The first item of this list is a whole sentence, long enough to be kept as a paragraph.
* Short item.

.. note:: Files should be closed when they are no longer needed, or opened in a **with** statement.

>>> open("x").read()  # what is typed goes away, however long the line is that shows it to the reader.

f(a, b=1, *c, **d) -> [(x, y) for x, y in zip(a, b) if x[0] != y[1]] + {1: 2}.
"""


def test_sentences_stay_and_markup_goes() -> None:
    assert paragraphs(SOURCE) == [
        "Opens the file path and returns a io.TextIOWrapper; see the guide for what mode may be.",
        "Changed in version 3.9. Accepts a path that is not a string, as other functions of this module do already.",
        "For example, this code prints every line of a file that may be very long indeed:",
        "The first item of this list is a whole sentence, long enough to be kept as a paragraph.",
        "Note: Files should be closed when they are no longer needed, or opened in a with statement.",
    ]


def test_a_paragraph_is_prose_or_it_is_not() -> None:
    assert is_prose("A sentence of some length, with a full stop at its end, is what a model should learn.")
    assert not is_prose("Too short to learn from.")
    assert not is_prose("A sentence of some length, but it has no end and so it may well be a heading or a caption")
    assert not is_prose("f(x, y) = [1, 2, 3, 4]; g(x) = {5: 6, 7: 8}; h() -> (9, 10, 11); i[12:13] != j[14] + 15.")


def test_documents_are_whole_files_without_repetitions(tmp_path: Path) -> None:
    sentences = [f"Sentence number {word * 3} says something that no other sentence of this text says." for word in
                 ("one.", "two.", "three.", "four.", "five.", "six.")]
    long = "\n\n".join(sentence for sentence in sentences for _ in range(2)) + "\n"
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "b.rst.txt").write_text("\n\n".join(f"{i} " + s for i, s in enumerate(sentences * 4)))
    (tmp_path / "library" / "a.rst").write_text(long)
    (tmp_path / "license.rst").write_text("\n\n".join(f"{i} " + s for i, s in enumerate(sentences * 4)))
    found = list(documents(tmp_path))
    assert len(found) == 1  # a.rst is short once its repetitions are gone; the licence is left out
    assert found[0].splitlines()[0] == f"0 {sentences[0]}"


def test_held_out_documents_are_not_learnt() -> None:
    found = [f"document {i}" for i in range(2 * HELD_OUT_EVERY + 1)]
    learnt, held_out = split(found)
    assert held_out == ["document 0", f"document {HELD_OUT_EVERY}", f"document {2 * HELD_OUT_EVERY}"]
    assert not set(learnt) & set(held_out)
    assert len(learnt) + len(held_out) == len(found)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"one\n\ntwo\n"])
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=str(path)):
        read_documents(path)


def test_windows_depend_on_the_seed_alone() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    first = windows(ids, count=3, length=8, seed=(0, 7))
    assert first.shape == (3, 10)
    assert (first[:, 1:] - first[:, :-1] == 1).all()
    assert (first == windows(ids, count=3, length=8, seed=(0, 7))).all()
    assert not (first == windows(ids, count=3, length=8, seed=(0, 8))).all()
    with pytest.raises(InvalidArgument):
        windows(ids[:10], count=1, length=8, seed=(0, 0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    shape = Shape(vocab_size=400)
    tokenizer = train_tokenizer(["the tokenizer learns from this text and others like this"] * 4, shape.vocab_size)
    write_tokenizer(tokenizer, shape, folder)
    (folder / "config.json").write_text(json.dumps(shape.config_json()))
    return folder


def test_the_tokenizer_has_deepseeks_special_tokens_where_the_config_says(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.bos_token_id == BOS_ID
    assert list(tokenizer.eos_token_ids) == [EOS_ID]
    for token_id, text in SPECIAL_TOKENS.items():
        assert tokenizer.encode(text, parse_special=True, add_bos=False) == [token_id]
    text = "learns: ünïcode \U0001f600"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_the_chat_template_is_the_shipped_ones(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    chat = [("system", "be brief"), ("system", "be right"), ("user", "this?"), ("assistant", "that"), ("user", "why")]
    messages = [ChatMessage(role=role, content=content) for role, content in chat]
    ids = tokenizer.chat_ids(messages)
    assert ids[0] == BOS_ID
    assert [i for i in ids if i in SPECIAL_TOKENS] == [BOS_ID, USER_ID, ASSISTANT_ID, EOS_ID, USER_ID, ASSISTANT_ID]
    shipped = Tokenizer.load(ROOT / "pd_engine" / "model" / "demo")
    assert tokenizer.decode(ids) == shipped.decode(shipped.chat_ids(messages))


def test_documents_are_wrapped_in_bos_and_eos() -> None:
    tokenizer = train_tokenizer(["some text"], 300)
    ids = encode(tokenizer, ["some", "text"]).tolist()
    assert ids[0] == BOS_ID
    assert ids[-1] == EOS_ID
    assert ids.count(BOS_ID) == ids.count(EOS_ID) == 2
