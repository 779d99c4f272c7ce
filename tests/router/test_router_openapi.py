"""What the HTTP door publishes of itself is true: of its fields, its answers and its methods."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from support.router_lab import RouterLab, router_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
CHAT = [{"role": "user", "content": "x"}]
ANSWER = {
    "role": "assistant", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[RouterLab]:
    async with router_lab() as lab:
        yield lab


async def document_of(lab: RouterLab) -> dict[str, Any]:
    return dict((await lab.http.get("/openapi.json")).json())


def schema_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    return dict(document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


async def test_nothing_is_referred_to_that_is_not_there(lab: RouterLab) -> None:
    document = await document_of(lab)
    assert '"#/$defs' not in json.dumps(document)
    for path in POSTS:
        assert document["paths"][path]["post"]["requestBody"]["required"]
        Draft202012Validator.check_schema(schema_of(document, path))


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 0, "stream_options": None}, 200),
    ("/v1/completions", {"prompt": ["x", [5, 6]], "max_tokens": 1, "top_k": -1, "logprobs": 20}, 200),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "stop": ["a"], "n": 2}, 200),
    ("/v1/chat/completions", {"messages": [*CHAT, {**ANSWER, "content": "y"}, *CHAT], "max_tokens": 1}, 200),
    ("/v1/chat/completions", {"messages": [{**ANSWER, "content": "", "tool_calls": [{"id": "1"}]}, *CHAT]}, 400),
    ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}}, 400),
    ("/tokenize", {"prompt": "x"}, 200), ("/detokenize", {"tokens": [4095]}, 200),
    ("/v1/completions", {"prompt": "x", "temperature": -0.1}, 400),
    ("/v1/completions", {"prompt": "x", "top_k": -2}, 400), ("/v1/completions", {"prompt": "x", "top_p": 0}, 400),
    ("/v1/completions", {"prompt": "", "max_tokens": 1}, 400), ("/v1/completions", {"prompt": [4096]}, 400),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400), ("/v1/completions", {"prompt": "x", "seed": 2**64}, 400),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [4096]}, 400),
    ("/v1/completions", {"prompt": "x", "stop": ""}, 400), ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
    ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"nothing": 1}}, 400),
    ("/v1/chat/completions", {"messages": [], "max_tokens": 1}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400),
    ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, 400),
    ("/detokenize", {"tokens": [4096]}, 400), ("/detokenize", {"tokens": [-1]}, 400),
])
async def test_schema_and_door_agree(lab: RouterLab, path: str, body: dict[str, Any], status: int) -> None:
    document = await document_of(lab)
    response = await lab.http.post(path, json=body)
    assert response.status_code == status, response.text
    assert Draft202012Validator(schema_of(document, path)).is_valid(body) is (status == 200)
    answers = document["paths"][path]["post"]["responses"][str(status)]["content"]
    assert response.headers["content-type"].partition(";")[0] in answers
    if status != 200:
        Draft202012Validator(answers["application/json"]["schema"]).validate(response.json())


async def test_another_method_is_told_the_right_one(lab: RouterLab) -> None:
    document = await document_of(lab)
    for template, operations in document["paths"].items():
        path = template.replace("{name}", "demo")
        response = await lab.http.request("DELETE", path)
        assert response.status_code == 405
        assert response.headers["allow"] == ", ".join(method.upper() for method in operations)
        assert response.json()["error"]["message"] == f"there is no DELETE {path} here"


async def test_every_answer_is_published(lab: RouterLab) -> None:
    paths = (await document_of(lab))["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        answers = paths[path]["post"]["responses"]
        assert set(answers) == {"200", "400", "401", "404", "405", "409", "429", "500", "503", "504"}
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    for path, media_type in (("/metrics", "text/plain"), ("/ui", "text/html"), ("/health", "application/json")):
        response = await lab.http.get(path)
        assert list(paths[path]["get"]["responses"]["200"]["content"]) == [media_type]
        assert response.headers["content-type"].startswith(media_type)
    assert "503" in paths["/health"]["get"]["responses"]
