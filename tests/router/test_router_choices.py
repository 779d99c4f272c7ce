"""Requests of several choices and prompts: many-of-one, and how they end together."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import Internal, InvalidArgument, ResourceExhausted
from pd_engine.sampling.params import seed_from_request_id, seed_of_choice
from pd_router.model_info import ModelInfo
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate

TOKENIZER = ModelInfo.load(settings()).tokenizer
OTHER = [9, 8, 7]
SEED = 5
SEEDS = [seed_of_choice(SEED, choice) for choice in range(3)]
BODY = {"prompt": [PROMPT, OTHER], "n": 3, "max_tokens": 6, "temperature": 1, "seed": SEED, "ignore_eos": True}
ANSWERS = [toy_generate(prompt, 6, seed) for prompt in (PROMPT, OTHER) for seed in SEEDS]


def test_seeds_of_choices() -> None:
    """The first has the request's own, so that its tokens do not depend on n."""
    seeds = [seed_of_choice(2**64 - 1, choice) for choice in range(128)]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**64 for seed in seeds)


async def ends(lab: RouterLab) -> dict[str, float]:
    """Terminal states, and how many choices have ended in each, once none runs: an answer may come a little earlier."""
    await eventually(lambda: lab.router.num_running == 0)
    lines = (await lab.http.get("/metrics")).text.splitlines()
    counts = [line.split() for line in lines if line.startswith("pdrelay_requests_total{")]
    return {name.split('"')[1]: float(value) for name, value in counts}


async def test_many_of_one() -> None:
    """many-of-one: two prompts and n = 3, whole."""
    async with router_lab(num_decode=2) as lab:
        reply = (await lab.http.post("/v1/completions", json={**BODY, "return_token_ids": True})).json()
        assert [choice["index"] for choice in reply["choices"]] == list(range(6))
        assert [choice["token_ids"] for choice in reply["choices"]] == ANSWERS
        assert [choice["text"] for choice in reply["choices"]] == [TOKENIZER.decode(ids) for ids in ANSWERS]
        assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [PROMPT] * 3 + [OTHER] * 3
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 36, 44)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 6}
        assert await ends(lab) == {"length": 6}


async def test_many_of_one_streamed() -> None:
    """many-of-one: the same, streamed; every chunk says of which choice it is."""
    async with router_lab(num_decode=2) as lab:
        body = {**BODY, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
        async with lab.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        ids, text, reasons = defaultdict(list), defaultdict(str), defaultdict(list)
        for chunk in chunks[:-1]:
            assert chunk["usage"] is None
            [choice] = chunk["choices"]
            assert not reasons[choice["index"]], "a chunk after its choice's last"
            ids[choice["index"]] += choice.get("token_ids", [])
            text[choice["index"]] += choice["text"]
            reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert [ids[index] for index in range(6)] == ANSWERS
        assert [text[index] for index in range(6)] == [TOKENIZER.decode(answer) for answer in ANSWERS]
        assert dict(reasons) == {index: ["length"] for index in range(6)}
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 36
        assert await ends(lab) == {"length": 6}


async def test_a_chat_of_several_choices() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    body = {"messages": turns, "n": 2, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, "stream": True}
    async with router_lab() as lab, lab.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line]
        choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
        for index in range(2):
            own = [choice for choice in choices if choice["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert own[-1]["finish_reason"] == "length"
            assert sum(len(choice.get("token_ids", [])) for choice in own) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_over_grpc(stream: bool) -> None:
    async with router_lab() as lab:
        request = lab.request(n=3, temperature=1.0, max_tokens=6, stream=stream, request_id="r")
        ids: dict[int, list[int]] = defaultdict(list)
        completes: dict[int, api.GenerateComplete] = {}
        async for response in lab.stream(request):
            if response.HasField("chunk"):
                chunk = response.chunk
                assert chunk.index == len(ids[chunk.choice])
                assert chunk.choice not in completes
                ids[chunk.choice] += chunk.token_ids
            else:
                assert response.complete.choice not in completes
                completes[response.complete.choice] = response.complete
        assert sorted(completes) == [0, 1, 2]
        for choice, complete in completes.items():
            assert complete.seed == seed_of_choice(seed_from_request_id("r"), choice)
            assert list(complete.output_ids) == toy_generate(PROMPT, 6, complete.seed)
            assert complete.usage == api.Usage(prompt_tokens=5, completion_tokens=6, cached_tokens=3)
            assert ids[choice] == (list(complete.output_ids) if stream else [])
        alone = await lab.generate(seed=completes[2].seed, temperature=1.0, max_tokens=6)
        assert alone.output_ids == completes[2].output_ids


async def test_equal_prompts_without_a_seed_differ() -> None:
    body: dict[str, Any] = {**BODY, "prompt": [PROMPT, PROMPT], "n": 1, "return_token_ids": True}
    async with router_lab() as lab:
        del body["seed"]
        choices = (await lab.http.post("/v1/completions", json=body)).json()["choices"]
        assert choices[0]["token_ids"] != choices[1]["token_ids"]
        choices = (await lab.http.post("/v1/completions", json={**body, "seed": 3})).json()["choices"]
        assert choices[0]["token_ids"] == choices[1]["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_choice_ends_the_request(stream: bool) -> None:
    """The others are cancelled: six terminal states, and nothing is left."""
    async with router_lab() as lab:
        lab.decode[0].faults.fail_at = {3: pb.Failure(code="internal", message="broke", retryable=False)}
        response = await lab.http.post("/v1/completions", json={**BODY, "max_tokens": 400, "stream": stream})
        if stream:
            *_, last, done = [line for line in response.text.splitlines() if line]
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == "broke"
            assert done == "data: [DONE]"
        else:
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "broke"
        await lab.assert_no_leaks()
        counts = await ends(lab)
        assert counts["failed"] == 1
        assert sum(counts.values()) == 6
        lab.decode[0].faults.fail_at = {3: pb.Failure(code="internal", message="broke", retryable=False)}
        with pytest.raises(Internal, match="broke"):
            await lab.complete(lab.request(n=3, temperature=1.0, max_tokens=400))


async def test_an_abort_ends_all_choices_with_what_they_have() -> None:
    async with router_lab() as lab:
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        body = {**BODY, "request_id": "r"}
        running = asyncio.create_task(lab.http.post("/v1/completions", json=body))
        await eventually(lambda: lab.router.num_running == 6)
        assert not (await lab.api.Abort(api.AbortRequest(request_ids=["r"]))).unknown_request_ids
        reply = (await running).json()
        gate.set()
        assert [choice["finish_reason"] for choice in reply["choices"]] == ["cancelled"] * 6
        await lab.assert_no_leaks()
        assert await ends(lab) == {"cancelled": 6}


async def test_a_client_that_goes_away_ends_all_choices() -> None:
    async with router_lab() as lab:
        lab.prefill[0].faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(lab.http.post("/v1/completions", json=BODY))
        await eventually(lambda: lab.router.num_running == 6)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await lab.assert_no_leaks()
        assert await ends(lab) == {"cancelled": 6}


async def test_each_choice_counts_as_a_running_request() -> None:
    async with router_lab(settings(router={"max_running_requests": 4, "max_waiting_requests": 0})) as lab:
        with pytest.raises(InvalidArgument, match="the request has 5 choices; at most 4 run at once here"):
            await lab.complete(lab.request(n=5))
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(lab.http.post("/v1/completions", json={**BODY, "prompt": PROMPT, "n": 4}))
        await eventually(lambda: lab.router.num_running == 4)
        with pytest.raises(ResourceExhausted, match="4 requests are running, 0 wait; at most 4 are allowed at once"):
            await lab.generate()
        gate.set()
        assert len((await running).json()["choices"]) == 4
