"""Bodies that the OpenAI door refuses: each with a status, a code and what is allowed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.router_lab import RouterLab, router_lab, settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <｜Assistant｜>"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_lab() -> AsyncIterator[RouterLab]:
    async with router_lab(settings()) as lab:
        yield lab


@pytest_asyncio.fixture(loop_scope="module")
async def lab(shared_lab: RouterLab) -> AsyncIterator[RouterLab]:
    """As if it were new."""
    shared_lab.forget()
    yield shared_lab
    await shared_lab.assert_no_leaks()


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"prompt": "x", "temprature": 1}, "unknown field temprature; did you mean temperature?"),
        ({"prompt": "x", "zzz": 1}, "unknown field zzz"),
        ({"prompt": "x", "stream_options": {"foo": 1}, "stream": True}, "unknown field stream_options.foo"),
        ({}, "prompt is missing"),
        ({"prompt": ""}, "the prompt must not be empty"),
        ({"prompt": []}, "prompt must be text or a list of token ids"),
        ({"prompt": None}, "prompt must be text"),
        ({"prompt": {"a": 1}}, "prompt must be text"),
        ({"prompt": [1.5]}, "prompt must be text"),
        ({"prompt": [True]}, "prompt must be text"),
        ({"prompt": [-1]}, "prompt token ids must be in"),
        ({"prompt": [2**70]}, "prompt token ids must be in"),
        ({"prompt": ["a", ""]}, "the prompt must not be empty"),
        ({"prompt": ["a", [5.5]]}, "prompt must be text"),
        ({"prompt": ["a"] * 129}, "at most 128 prompts are allowed, got 129"),
        ({"prompt": ["a", "b"], "n": 65}, "a request has at most 128 choices, got 2 prompts with 65 each"),
        ({"prompt": "a\ud800"}, "UTF-8"),
        ({"prompt": "x", "temperature": -1}, "temperature must be"),
        ({"prompt": "x", "temperature": "1"}, "temperature: Input should be a valid number"),
        ({"prompt": "x", "temperature": 1e400}, "temperature: Input should be a finite number"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be >= 1"),
        ({"prompt": "x", "max_tokens": 10**30}, "max_tokens must be at most"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "n": 0}, "n must be in [1, 128], got 0"),
        ({"prompt": "x", "n": 2**70}, "n must be in [1, 128]"),
        ({"prompt": "x", "n": -1}, "n must be in [1, 128]"),
        ({"prompt": "x", "best_of": 3}, "best_of is not supported"),
        ({"prompt": "x", "echo": True}, "echo is not supported"),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias must be in [-100, 100], got 101.0 for token 5"),
        ({"prompt": "x", "logit_bias": {"5": "1"}}, "logit_bias must have numbers as values"),
        ({"prompt": "x", "logit_bias": {"5": 1e400}}, "logit_bias must be in [-100, 100], got inf"),
        ({"prompt": "x", "logit_bias": {"5": True}}, "logit_bias must have numbers as values"),
        ({"prompt": "x", "logit_bias": {"-5": 1}}, "logit_bias must have token ids as keys"),
        ({"prompt": "x", "logit_bias": {"five": 1}}, "logit_bias must have token ids as keys"),
        ({"prompt": "x", "logit_bias": {"4096": 1}}, "token ids of logit_bias must be in [0, 4096), got 4096"),
        ({"prompt": "x", "logit_bias": {"5": 1, "05": 1}}, "logit_bias must name each token once"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias has at most 1024 tokens"),
        ({"prompt": "x", "logit_bias": [5]}, "logit_bias: Input should be a valid dictionary"),
        ({"prompt": "x", "presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
        ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3.0"),
        ({"prompt": "x", "frequency_penalty": 1e400}, "frequency_penalty: Input should be a finite number"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty must be in [0.01, 100], got 0.0"),
        ({"prompt": "x", "min_p": 1.5}, "min_p must be in [0, 1], got 1.5"),
        ({"prompt": [5] * 4090, "max_tokens": 7}, "max_tokens must be at most 6"),
        ({"prompt": "x", "max_tokens": 16, "min_tokens": 17}, "min_tokens must be in [0, 16], which is max_tokens"),
        ({"prompt": [5] * 4090, "min_tokens": 7}, "min_tokens must be in [0, 6], which is max_tokens, got 7"),
        ({"prompt": "x", "min_tokens": -1}, "min_tokens must be in [0, 16]"),
        ({"prompt": "x", "logprobs": 50}, "logprobs must be"),
        ({"prompt": "x", "stop": 7}, "stop"),
        ({"prompt": "x", "stop": ["a"] * 99}, "stop strings"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options is only for"),
        ({"prompt": "x", "seed": -1}, "seed must be"),
        ({"prompt": "x", "top_k": 2**31}, "top_k must be in"),
        ({"prompt": "x", "stop_token_ids": ["a", "b"]}, "stop_token_ids.0: Input should be a valid integer"),
        ({"prompt": "x" * 2_000_000}, "the prompt has 2000000 characters"),
        ({"prompt": [5] * 5000}, "the prompt has 5000 tokens"),
        ({"prompt": "x", "request_id": "a b"}, "request_id must be"),
    ],
)
async def test_a_bad_completion_body(lab: RouterLab, body: dict[str, Any], match: str) -> None:
    content = json.dumps(body).replace("Infinity", "1e400")
    response = await lab.http.post("/v1/completions", content=content)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert match in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_argument")
    assert lab.prefill[0].calls == []


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("field", [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "max_tokens", "min_tokens", "n", "logprobs", "speculate", "logit_bias", "stop_token_ids", "prompt", "priority",
])
async def test_a_number_beyond_all_ranges(lab: RouterLab, field: str, sign: int) -> None:
    """It is refused by name, and its digits do not come back."""
    number = sign * 10**400
    value: Any = {"logit_bias": {"5": number}, "stop_token_ids": [number], "prompt": [number]}.get(field, number)
    response = await lab.http.post("/v1/completions", json={"prompt": "x", field: value})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert field in message
    assert len(message) < 250
    assert lab.prefill[0].calls == []


async def test_how_many_tokens_a_completion_has_that_names_no_number(lab: RouterLab) -> None:
    """OpenAI's 16; fewer if no more fit, more if min_tokens asks for them."""
    for fields, expected in (
        ({"prompt": "x"}, 16), ({"prompt": [5] * 4090}, 6), ({"prompt": "x", "min_tokens": 20}, 20),
        ({"prompt": "x", "min_tokens": 3}, 16),
    ):
        reply = (await lab.http.post("/v1/completions", json={"ignore_eos": True, **fields})).json()
        assert reply["usage"]["completion_tokens"] == expected
        assert lab.prefill[0].requests[-1].sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({}, "messages is missing"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": "x"}, "messages: Input should be a valid list"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0 must be"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role must be one of system, user, assistant"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "unknown field messages.0.foo"),
        ({"messages": TURNS, "top_logprobs": 2}, "top_logprobs is only for"),
        ({"messages": TURNS, "tools": [{"type": "function"}]}, "tools is not supported"),
        ({"messages": TURNS, "response_format": {"type": "json_object"}}, "response_format is not supported"),
    ],
)
async def test_a_bad_chat_body(lab: RouterLab, body: dict[str, Any], match: str) -> None:
    response = await lab.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert match in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{}", b'{"prompt": "\xff"}', b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object(lab: RouterLab, content: bytes) -> None:
    response = await lab.http.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert "JSON object" in response.json()["error"]["message"]


async def test_a_body_that_is_too_large(lab: RouterLab) -> None:
    response = await lab.http.post("/v1/completions", content=b" " * (33 * 1024 * 1024))
    assert response.status_code == 400
    assert "bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "content", "match"),
    [
        ("/v1/completions", b'{"prompt": [' + b"1," * 200_000 + b"1]}", "at most 69632 values"),
        ("/v1/completions", b'{"prompt": "x", "tools": [' + b"{}," * 200_000 + b"1]}", "at most 69632 values"),
        ("/v1/completions", b'"' * 2_000_000, "at most 69632 values"),
        ("/v1/chat/completions", b'{"messages": [' + b"{}," * 30_000 + b"{}]}", "messages.0.role is missing"),
        ("/v1/completions", b'{"prompt": "' + b"a" * 5_000_000 + b'"}', "at most 2146304 bytes"),
    ],
)
async def test_a_body_is_bounded_before_it_is_parsed(lab: RouterLab, path: str, content: bytes, match: str) -> None:
    response = await lab.http.post(path, content=content)
    assert response.status_code == 400
    assert match in response.json()["error"]["message"]


async def test_unknown_fields_are_listed_up_to_a_few(lab: RouterLab) -> None:
    body: dict[str, Any] = {"prompt": "x"} | {f"k{i}": i for i in range(30_000)}
    message = (await lab.http.post("/v1/completions", json=body)).json()["error"]["message"]
    assert message == "; ".join(f"unknown field k{i}" for i in range(5))
