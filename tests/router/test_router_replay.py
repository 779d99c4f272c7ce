"""A client that comes back with the tokens it has: another router goes on after them, as after a lost worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import InvalidArgument, ResourceExhausted
from pd_router.model_info import ModelInfo
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate

TOKENIZER = ModelInfo.load(settings()).tokenizer
ANSWER = toy_generate(PROMPT, 20)
ASKED: dict[str, Any] = {"request_id": "one", "max_tokens": 20, "stream": True}


async def read(lab: RouterLab, has: list[int], **fields: Any) -> tuple[list[int], str, api.GenerateComplete]:
    """(tokens, text, last message) of a stream after those."""
    ids, text, complete = [], "", None
    request = lab.request(resume_output_ids=[api.TokenIds(ids=has)], **{**ASKED, **fields})
    async for response in lab.stream(request):
        if response.HasField("chunk"):
            assert response.chunk.index == len(has) + len(ids)
            ids += response.chunk.token_ids
            text += response.chunk.text
        else:
            complete = response.complete
    assert complete is not None
    return ids, text, complete


def prefills(lab: RouterLab) -> list[int]:
    """Emitted tokens of each prompt that workers were given."""
    requests = [one for stub in lab.prefill for one in stub.requests if isinstance(one, pb.PrefillRequest)]
    return [len(one.token_ids) - one.num_prompt_tokens for one in requests]


@pytest.mark.parametrize("num_had", [0, 1, 7, 18, 19])
async def test_another_router_goes_on_after_what_the_client_has(num_had: int) -> None:
    async with router_lab(burst=2) as lab:
        ids, text, complete = await read(lab, ANSWER[:num_had])
        assert (ids, list(complete.output_ids)) == (ANSWER[num_had:], ANSWER)
        assert TOKENIZER.decode(ANSWER[:num_had]) + text == TOKENIZER.decode(ANSWER) == complete.text
        assert (complete.finish_reason, complete.usage.completion_tokens) == ("length", 20)
        assert prefills(lab) == [num_had]
        await eventually(lambda: lab.router.num_running == 0)
        lines = (await lab.http.get("/metrics")).text
        assert f'vllm:generation_tokens_total{{model_name="demo"}} {20.0 - num_had}' in lines


async def test_who_has_all_tokens_gets_the_end() -> None:
    """The last one is generated again: it is what ends the choice."""
    async with router_lab() as lab:
        ids, text, complete = await read(lab, ANSWER)
        assert (ids, text, list(complete.output_ids)) == ([], "", ANSWER)
        assert prefills(lab) == [19]
    async with router_lab() as lab:
        _, _, complete = await read(lab, ANSWER[:4], stop_token_ids=[ANSWER[3]])
        assert (complete.finish_reason, complete.stop_reason) == ("stop", str(ANSWER[3]))
        assert list(complete.output_ids) == ANSWER[:4]
        assert prefills(lab) == [3]


async def test_each_choice_goes_on_from_its_own() -> None:
    async with router_lab() as lab:
        wholes = {}
        request = lab.request(n=2, temperature=1.0, seed=3, max_tokens=20)
        async for response in lab.stream(request):
            wholes[response.complete.choice] = list(response.complete.output_ids)
        lab.forget()
        body = {
            "prompt": PROMPT, "n": 2, "temperature": 1, "seed": 3, "max_tokens": 20, "ignore_eos": True,
            "request_id": "one", "stream": True, "return_token_ids": True,
            "resume_output_ids": [wholes[0][:5], wholes[1][:12]],
        }
        async with lab.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        found: dict[int, list[int]] = {0: [], 1: []}
        for line in lines[:-1]:
            [choice] = json.loads(line)["choices"]
            found[choice["index"]] += choice.get("token_ids", [])
        assert found == {0: wholes[0][5:], 1: wholes[1][12:]}
        assert sorted(prefills(lab)) == [5, 12]


async def test_with_logprobs_they_are_generated_again() -> None:
    async with router_lab() as lab:
        ids, _, complete = await read(lab, ANSWER[:7], logprobs=0)
        assert (ids, len(complete.logprobs)) == (ANSWER[7:], 20)
        assert prefills(lab) == [0]


async def test_tokens_that_are_not_those_of_a_known_request_are_refused() -> None:
    async with router_lab() as lab:
        await read(lab, [])
        wrong = [*ANSWER[:3], ANSWER[3] + 1]
        with pytest.raises(
            InvalidArgument, match=f"have {wrong[3]} at index 3 of choice 0, where it has {ANSWER[3]}"
        ):
            await read(lab, wrong)
        assert (await read(lab, ANSWER[:4]))[0] == ANSWER[4:]
        assert prefills(lab) == [0]


async def test_a_last_token_that_it_does_not_end_with_is_refused() -> None:
    async with router_lab() as lab:
        with pytest.raises(InvalidArgument, match="at index 19 of choice 0, where it has"):
            await read(lab, [*ANSWER[:19], ANSWER[19] + 1])


async def test_targets_count_for_what_is_resumed() -> None:
    """Nobody passes them by with tokens of his own making."""
    async with router_lab(settings(router={"max_running_requests": 1, "max_waiting_requests": 0})) as lab:
        lab.decode[0].faults.stall_at = 3
        call = lab.api.Generate(lab.request(max_tokens=4000, stream=True))
        await call.read()
        with pytest.raises(ResourceExhausted):
            await read(lab, ANSWER[:5])
        assert 'pdrelay_requests_total{end="rejected",model_name="demo"} 1.0' in (await lab.http.get("/metrics")).text
        call.cancel()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resume_output_ids": [[4096]]}, "resume_output_ids must be in"),
        ({"resume_output_ids": [[1] * 21]}, r"tokens of a choice are in \[0, 20\], its max_tokens, got 21"),
        ({"resume_output_ids": [[1], [2]]}, "must have one for each of the 1 choices, got 2"),
        ({"resume_output_ids": [[1]], "resume_from": [1]}, "in place of resume_from: give one of them"),
        ({"resume_output_ids": [[1]], "request_id": ""}, "are for a request with a request_id"),
        ({"resume_output_ids": [[1]], "stream": False}, "only for stream: true"),
        ({"resume_output_ids": [[5, 6, 7]], "stop_token_ids": [6]}, "go on after index 1, where a choice ends"),
        ({"resume_output_ids": [[1]] * 129}, "at most 128 lists in resume_output_ids are allowed, got 129"),
    ],
)
async def test_what_cannot_be_resumed(fields: dict[str, Any], message: str) -> None:
    has = [api.TokenIds(ids=ids) for ids in fields["resume_output_ids"]]
    async with router_lab() as lab:
        request = lab.request(**{**ASKED, **fields, "resume_output_ids": has})
        with pytest.raises(InvalidArgument, match=message):
            await lab.complete(request)
        assert not lab.prefill[0].requests


@pytest.mark.parametrize("wrong", ["x", 5, [1, "2"], [[1], 2], [[True]], {"0": [1]}])
async def test_a_body_with_other_things_in_place_of_ids(wrong: Any) -> None:
    async with router_lab() as lab:
        body = {"prompt": PROMPT, "request_id": "one", "stream": True, "resume_output_ids": wrong}
        response = await lab.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert "resume_output_ids must be a list of token ids" in response.json()["error"]["message"]
