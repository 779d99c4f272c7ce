"""The OpenAI door: shapes, streaming, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.text.chat import ChatMessage
from pd_router.model_info import ModelInfo
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = ModelInfo.load(settings()).tokenizer
ANSWER = toy_generate(PROMPT, 8)
BASE = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <｜Assistant｜>"}]
CHAT = {"messages": TURNS, "max_completion_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT_IDS = TOKENIZER.chat_ids([ChatMessage(turn["role"], turn["content"]) for turn in TURNS])


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


async def events(lab: RouterLab, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON objects of a stream; it must end with [DONE]."""
    async with lab.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion(lab: RouterLab) -> None:
    reply = (await lab.http.post("/v1/completions", json={**BASE, "model": "demo", "request_id": "r1"})).json()
    assert reply["id"] == "cmpl-r1"
    assert (reply["object"], reply["model"]) == ("text_completion", "demo")
    [choice] = reply["choices"]
    assert choice == {
        "index": 0,
        "text": TOKENIZER.decode(ANSWER),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert reply["usage"]["prompt_tokens"] == 5
    assert reply["usage"]["completion_tokens"] == 8
    assert reply["usage"]["total_tokens"] == 13
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_streamed_completion(lab: RouterLab) -> None:
    chunks = await events(lab, "/v1/completions", {**BASE, "stream_options": {"include_usage": True}})
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == TOKENIZER.decode(ANSWER)
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-2])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8


async def test_a_chat(lab: RouterLab) -> None:
    reply = (await lab.http.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})).json()
    [choice] = reply["choices"]
    answer = toy_generate(CHAT_IDS, 8)
    assert reply["object"] == "chat.completion"
    assert choice["prompt_token_ids"] == CHAT_IDS
    assert choice["token_ids"] == answer
    assert choice["message"] == {"role": "assistant", "content": TOKENIZER.decode(answer)}
    assert choice["finish_reason"] == "length"


async def test_a_streamed_chat(lab: RouterLab) -> None:
    chunks = await events(lab, "/v1/chat/completions", {**CHAT, "return_token_ids": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    answer = toy_generate(CHAT_IDS, 8)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert (text, ids) == (TOKENIZER.decode(answer), answer)


async def test_content_may_come_in_parts(lab: RouterLab) -> None:
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "<｜Assistant｜>"}]
    body = {**CHAT, "messages": [TURNS[0], {"role": "user", "content": parts}], "return_token_ids": True}
    reply = (await lab.http.post("/v1/chat/completions", json=body)).json()
    assert reply["choices"][0]["prompt_token_ids"] == CHAT_IDS


async def test_logprobs(lab: RouterLab) -> None:
    reply = (await lab.http.post("/v1/completions", json={**BASE, "logprobs": 2})).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [TOKENIZER.decode([i]) for i in ANSWER]
    assert logprobs["token_logprobs"] == [-0.5] * 8
    assert len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == 8
    chunks = await events(lab, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1})
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    answer = toy_generate(CHAT_IDS, 8)
    assert b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace") == TOKENIZER.decode(answer)
    assert all(len(e["top_logprobs"]) == 1 for e in entries)


async def test_stop_and_seed_and_defaults(lab: RouterLab) -> None:
    whole = TOKENIZER.decode(ANSWER)
    body = {**BASE, "stop": whole[3:6], "seed": 5}
    [choice] = (await lab.http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == whole[: whole.index(whole[3:6])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[3:6])
    assert lab.prefill[0].requests[-1].sampling.seed == 5
    reply = (await lab.http.post("/v1/completions", json={"prompt": "hello", "ignore_eos": True})).json()
    assert reply["usage"]["completion_tokens"] == 16
    assert lab.prefill[0].requests[-1].sampling.temperature == pytest.approx(0.7)


async def test_what_changes_the_logits(lab: RouterLab) -> None:
    """OpenAI's names and vLLM's; their neutral values ask for nothing."""
    body = {
        **BASE, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 2,
        "logit_bias": {"7": -100, "5": 1.5}, "min_tokens": 2,
    }
    assert (await lab.http.post("/v1/completions", json=body)).status_code == 200
    sampling = lab.prefill[0].requests[-1].sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 2.0)
    assert (dict(sampling.logit_bias), sampling.min_tokens) == ({5: 1.5, 7: -100.0}, 2)
    body = {
        **BASE, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
        "min_tokens": 0,
    }
    assert (await lab.http.post("/v1/completions", json=body)).status_code == 200
    neutral = lab.prefill[0].requests[-1].sampling
    assert (await lab.http.post("/v1/completions", json={**body, "logit_bias": None, "min_p": None})).status_code == 200
    assert (await lab.http.post("/v1/completions", json=BASE)).status_code == 200
    assert all(request.sampling.repetition_penalty == 1 for request in lab.prefill[0].requests[-3:])
    assert (neutral.min_p, neutral.presence_penalty, neutral.min_tokens, len(neutral.logit_bias)) == (0, 0, 0, 0)


async def test_neutral_fields_of_other_servers_are_taken(lab: RouterLab) -> None:
    extra = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "user": "me",
        "stop": None,
        "logprobs": None,
        "min_tokens": 0,
    }
    response = await lab.http.post("/v1/completions", json={**BASE, **extra})
    assert response.status_code == 200, response.text


async def test_another_model_and_unknown_paths(lab: RouterLab) -> None:
    response = await lab.http.post("/v1/completions", json={**BASE, "model": "gpt-4"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    for method, path in (("GET", "/nothing"), ("POST", "/v1/embeddings"), ("GET", "/v1/completions")):
        response = await lab.http.request(method, path)
        assert response.status_code in (404, 405)
        assert f"there is no {method} {path}" in response.json()["error"]["message"]


async def test_the_system_is_full() -> None:
    async with router_lab(settings(router={"max_running_requests": 1, "max_waiting_requests": 0})) as lab:
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        running = asyncio.create_task(lab.http.post("/v1/completions", json=BASE))
        await eventually(lambda: lab.router.num_running == 1)
        response = await lab.http.post("/v1/completions", json=BASE)
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        gate.set()
        assert (await running).status_code == 200


async def test_an_error_before_the_first_token_is_a_status_even_when_streaming() -> None:
    async with router_lab(num_decode=0) as lab:
        for stream in (False, True):
            response = await lab.http.post("/v1/completions", json={**BASE, "stream": stream})
            assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")


async def test_an_error_after_the_first_token_is_an_event(lab: RouterLab) -> None:
    lab.decode[0].faults.fail_at = {3: pb.Failure(code="internal", message="broke", retryable=False)}
    chunks = await events(lab, "/v1/completions", {**BASE, "return_token_ids": True})
    assert chunks[-1]["error"]["message"] == "broke"
    ids = [i for chunk in chunks[:-1] for i in chunk["choices"][0]["token_ids"]]
    assert ids == ANSWER[: len(ids)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_client_that_goes_away_ends_its_request(lab: RouterLab, stream: bool, when: str) -> None:
    """Before the first token, and after some."""
    if when == "before":
        lab.prefill[0].faults.prefill_gate = asyncio.Event()
        stub, arrived = lab.prefill[0], "Prefill"
    else:
        lab.decode[0].faults.stall_at = 3
        stub, arrived = lab.decode[0], "stall"
    body = {**BASE, "stream": stream}
    running = asyncio.create_task(lab.http.post("/v1/completions", json=body))
    await stub.arrived[arrived].wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await lab.assert_no_leaks()


async def test_a_client_that_goes_away_within_its_body(lab: RouterLab, caplog: pytest.LogCaptureFixture) -> None:
    """It is told nothing, and neither is the log."""
    url = lab.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert not await reader.read()
    assert (await lab.http.post("/v1/completions", json=BASE)).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_models_health_live_and_metrics() -> None:
    async with router_lab() as lab:
        [model] = (await lab.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("demo", 4096)
        assert (await lab.http.get("/health")).status_code == 200
        assert (await lab.http.get("/live")).status_code == 200
        await lab.http.post("/v1/completions", json=BASE)
        await eventually(lambda: lab.router.num_running == 0)
        metrics = (await lab.http.get("/metrics")).text
        assert 'pdrelay_requests_total{end="length",model_name="demo"} 1.0' in metrics
        assert 'vllm:generation_tokens_total{model_name="demo"} 8.0' in metrics
        assert 'pdrelay_workers{role="decode",state="ready"} 1.0' in metrics
        await lab.decode[0].kill()
        await eventually(lambda: not lab.router._registry.serving)
        assert (await lab.http.get("/health")).status_code == 503
        assert (await lab.http.get("/live")).status_code == 200
        await lab.decode[0].start()
