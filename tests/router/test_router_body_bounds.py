"""What is refused before it is parsed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument
from pd_router.body_bounds import MAX_BODY_BYTES, BodyBounds


def fits(data: bytes, max_values: int) -> bool:
    try:
        BodyBounds(max_bytes=0, max_values=max_values).check_num_values(data)
    except InvalidArgument:
        return False
    return True


def test_text_full_of_punctuation_is_no_structure() -> None:
    body = {"prompt": 'a\\",[{' * 300, "max_tokens": 1}
    assert fits(json.dumps(body).encode(), 2)
    assert not fits(json.dumps([body] * 3).encode(), 2)


@pytest.mark.parametrize("data", [b'"', b'"\\', b'\\"' * 1000, b'"\\\n"' * 2, b'{"a": ",', b"", b'"\\"' + b"," * 9])
def test_what_is_no_json_is_for_the_parser_to_refuse(data: bytes) -> None:
    assert fits(data, 1)


@pytest.mark.parametrize("data", [b"1," * 9, b'"",' * 9, b'""' * 9, b"[" * 9, b"{" * 9, b'"x",[{'])
def test_many_values_in_any_form(data: bytes) -> None:
    assert not fits(data, 2)


def random_value(rng: random.Random, depth: int = 0) -> tuple[Any, int]:
    """A JSON value, and how many values it has with all in it."""
    kind = rng.randrange(3 if depth < 4 else 1)
    if kind == 0:
        return rng.choice([1, -2.5, True, None, "", 'a",b', "\\", '\\"[', "é{,"]), 1
    parts = [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    count = 1 + sum(count for _, count in parts)
    values = [value for value, _ in parts]
    return (values if kind == 1 else {f'k{i}",': value for i, value in enumerate(values)}), count


def test_no_body_within_half_the_limit_is_refused() -> None:
    """An empty list counts as a value and a bracket."""
    rng = random.Random(5)
    for _ in range(500):
        value, count = random_value(rng)
        assert fits(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(), 2 * count), value


def test_the_bounds_of_a_context() -> None:
    small = BodyBounds.of_context(max_context_length=4096, max_token_chars=21)
    whole_context = json.dumps({"prompt": "\U0001f600" * 21 * 4096})  # twelve bytes each
    small.check_num_bytes(len(whole_context))
    with pytest.raises(InvalidArgument, match=f"at most {small.max_bytes} bytes"):
        small.check_num_bytes(small.max_bytes + 1)
    assert BodyBounds.of_context(max_context_length=163_840, max_token_chars=500).max_bytes == MAX_BODY_BYTES
