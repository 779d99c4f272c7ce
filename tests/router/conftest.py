"""A tokenizer is loaded once a session: nearly every test here starts a router of its own."""

from __future__ import annotations

import functools

import pytest

from pd_engine.text.tokenizer import Tokenizer

load_once = functools.cache(Tokenizer.load)


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "load", staticmethod(load_once))
