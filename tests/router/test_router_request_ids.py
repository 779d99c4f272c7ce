"""Request ids: what is sent again is the same request, running or ended, read on from where its client stopped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import AlreadyExists, Internal, InvalidArgument, ResourceExhausted
from pd_router.known_requests import KnownRequests, RequestKey
from pd_router.model_info import ModelInfo
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate

TOKENIZER = ModelInfo.load(settings()).tokenizer
ANSWER = toy_generate(PROMPT, 20)
ASKED: dict[str, Any] = {"request_id": "one", "max_tokens": 20, "stream": True}
KEEP_S, MAX_COST = 10.0, 50


def num_prefills(lab: RouterLab) -> int:
    return sum(name == "Prefill" for stub in lab.prefill for name, _, _ in stub.calls)


async def read(lab: RouterLab, **fields: Any) -> tuple[int, list[int], str]:
    """(index of the first token, tokens, text) of a whole stream."""
    first, ids, text = -1, [], ""
    async for response in lab.stream(lab.request(**{**ASKED, **fields})):
        if response.HasField("chunk"):
            first = response.chunk.index if first < 0 else first
            ids += response.chunk.token_ids
            text += response.chunk.text
    return first, ids, text


async def begin(lab: RouterLab, num_tokens: int, **fields: Any) -> Any:
    """A stream of which that many tokens have come."""
    call = lab.api.Generate(lab.request(**{**ASKED, **fields}))
    seen = 0
    while seen < num_tokens:
        seen += len((await call.read()).chunk.token_ids)
    return call


def text_from(index: int) -> str:
    """Of tokens of whole characters: what the rest of a stream shows."""
    return TOKENIZER.decode(ANSWER)[len(TOKENIZER.decode(ANSWER[:index])) :]


async def test_the_same_request_attaches_to_the_one_that_runs() -> None:
    async with router_lab() as lab:
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        readers = [asyncio.create_task(read(lab)) for _ in range(3)]
        await eventually(lambda: num_prefills(lab) == 1)
        gate.set()
        assert {(first, tuple(ids)) for first, ids, _ in await asyncio.gather(*readers)} == {(0, tuple(ANSWER))}
        assert num_prefills(lab) == 1


async def test_one_reader_may_go_while_another_reads() -> None:
    async with router_lab() as lab:
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        going, staying = asyncio.create_task(read(lab)), asyncio.create_task(read(lab))
        await eventually(lambda: num_prefills(lab) == 1 and num_readers(lab) == 2)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        gate.set()
        assert (await staying)[1] == ANSWER
        assert num_prefills(lab) == 1


async def test_an_ended_request_is_read_from_any_index() -> None:
    async with router_lab(burst=3) as lab:
        await read(lab)
        for index in (0, 1, 7, 19, 20):
            first, ids, text = await read(lab, resume_from=[index])
            assert (first, ids) == (index if index < 20 else -1, ANSWER[index:])
            assert text == text_from(index)
        assert num_prefills(lab) == 1


async def test_another_router_makes_the_same_tokens_and_withholds_what_the_client_has() -> None:
    """Without a seed, and not greedy: the request id decides."""
    async with router_lab() as one, router_lab(settings(router={"request_keep_ms": 0}), burst=2) as other:
        _, ids, whole = await read(one, temperature=1.0)
        for index in (0, 7, 20):
            _, rest, text = await read(other, temperature=1.0, resume_from=[index])
            assert (rest, whole.endswith(text)) == (ids[index:], True)
        assert (num_prefills(one), num_prefills(other)) == (1, 3)


async def test_another_content_under_the_id_is_refused() -> None:
    async with router_lab() as lab:
        await read(lab)
        for change in ({"max_tokens": 19}, {"prompt": [9]}, {"temperature": 0.5}, {"cache_salt": "x"}, {"n": 2}):
            with pytest.raises(AlreadyExists, match="a request with id 'one' and another content is known here"):
                await read(lab, **change)
        body = {"prompt": PROMPT, "request_id": "one", "max_tokens": 20}
        response = await lab.http.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "already_exists")


async def test_a_resumable_request_goes_on_without_its_client() -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.stall_at = 5
        call = await begin(lab, 5, resumable=True)
        call.cancel()
        await eventually(lambda: num_readers(lab) == 0)
        await lab.decode[0].kill()  # ends the stall: the rest comes from another attempt
        await lab.decode[0].start()
        first, ids, _ = await read(lab, resumable=True, resume_from=[5])
        assert (first, ids) == (5, ANSWER[5:])


async def test_a_resumable_request_ends_after_its_grace() -> None:
    async with router_lab(settings(router={"resume_grace_ms": 1})) as lab:
        lab.decode[0].faults.stall_at = 5
        (await begin(lab, 5, resumable=True)).cancel()
        await lab.assert_no_leaks()
        assert (await read(lab, resumable=True, resume_from=[5]))[1] == ANSWER[5:]
        assert num_prefills(lab) == 2


async def test_what_is_not_resumable_ends_with_its_client_and_its_id_is_free() -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.stall_at = 5
        (await begin(lab, 5)).cancel()
        await lab.assert_no_leaks()
        assert (await read(lab, max_tokens=6))[1] == ANSWER[:6]


async def test_what_failed_or_was_aborted_may_be_sent_again() -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.fail_at = {3: pb.Failure(code="internal", message="broke", retryable=False)}
        with pytest.raises(Internal, match="broke"):
            await read(lab)
        assert (await read(lab, resume_from=[3]))[1] == ANSWER[3:]
        lab.decode[0].faults.stall_at = 3
        call = await begin(lab, 3, request_id="two")
        assert lab.router._dispatcher.abort("two")
        assert not running_in(lab), "the id of what was cut off is free at once"
        assert (await read(lab, request_id="two"))[1] == ANSWER
        call.cancel()


async def test_ids_are_kept_for_a_stated_time() -> None:
    async with router_lab(settings(router={"request_keep_ms": 0})) as lab:
        await read(lab)
        await eventually(lambda: lab.router.num_running == 0)
        assert (await read(lab, max_tokens=3))[1] == ANSWER[:3]


async def test_a_request_that_is_known_is_let_in_when_the_system_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full at the door already: nobody may wait in line, or come to be judged."""
    monkeypatch.setattr("pd_router.admission.NUM_BEING_JUDGED", 0)
    async with router_lab(settings(router={"max_running_requests": 1, "max_waiting_requests": 0})) as lab:
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        first = asyncio.create_task(read(lab))
        await eventually(lambda: num_prefills(lab) == 1)
        second = asyncio.create_task(read(lab))
        await eventually(lambda: num_readers(lab) == 2)
        with pytest.raises(ResourceExhausted):
            await read(lab, request_id="two")
        gate.set()
        assert (await first)[1] == (await second)[1] == ANSWER


BAD_RESUMES: list[tuple[dict[str, Any], str]] = [
    ({"resume_from": [21]}, r"resume_from: tokens of a choice are in \[0, 20\], its max_tokens, got 21"),
    ({"resume_from": [1, 2]}, "resume_from must have one for each of the 1 choices, got 2"),
    ({"resume_from": [0] * 200}, "at most 128 numbers in resume_from are allowed, got 200"),
    ({"resume_from": [1], "request_id": ""}, "resume_output_ids are for a request with a request_id"),
    ({"resumable": True, "request_id": ""}, "resume_output_ids are for a request with a request_id"),
    ({"resume_from": [1], "stream": False}, "resume_from and resume_output_ids are only for stream: true"),
    ({"resume_from": [9], "stop_token_ids": [ANSWER[3]]}, "resume_from is 9, but choice 0 has 4 tokens"),
]


async def test_bad_resumes() -> None:
    async with router_lab() as lab:
        for fields, message in BAD_RESUMES:
            with pytest.raises(InvalidArgument, match=message):
                await read(lab, **fields)
            await eventually(lambda: not running_in(lab))


async def test_a_resume_over_http_continues_text_ids_and_offsets() -> None:
    async with router_lab() as lab:
        body = {
            "prompt": PROMPT, "request_id": "one", "max_tokens": 20, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": 0, "stream": True,
        }
        whole, rest = [await http_choices(lab, {**body, **more}) for more in ({}, {"resume_from": 7})]
        joined = [
            ([i for c in choices for i in c["token_ids"]], "".join(c["text"] for c in choices),
             [offset for c in choices for offset in c["logprobs"]["text_offset"]])
            for choices in (whole, rest)
        ]
        assert joined[0][0] == ANSWER
        assert joined[1][0] == ANSWER[7:]
        assert joined[1][1] == text_from(7)
        assert joined[1][2] == joined[0][2][7:]
        assert num_prefills(lab) == 1
        response = await lab.http.post("/v1/completions", json={**body, "stream": False, "resume_from": 7})
        assert "resume_from and resume_output_ids are only for stream: true" in response.json()["error"]["message"]


async def http_choices(lab: RouterLab, body: dict[str, Any]) -> list[dict[str, Any]]:
    """With tokens in them."""
    async with lab.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return [choice for choice in choices if choice.get("token_ids")]


def running_in(lab: RouterLab) -> list[Any]:
    return lab.router._dispatcher._known.running()


def num_readers(lab: RouterLab) -> int:
    return sum(running.num_readers for running in running_in(lab))


class KnownRequestsMachine(RuleBasedStateMachine):
    """Against a plain list of what was kept, when, and at what cost."""

    def __init__(self) -> None:
        super().__init__()
        self.known: KnownRequests[object] = KnownRequests(keep_s=KEEP_S, max_cost=MAX_COST)
        self.now_s = 0.0
        self.running: dict[RequestKey, tuple[bytes, object]] = {}
        self.ended: list[tuple[RequestKey, bytes, object, float, int]] = []  # in order of their ends

    def trim(self) -> None:
        while self.ended and (self.ended[0][3] <= self.now_s or sum(entry[4] for entry in self.ended) > MAX_COST):
            self.ended.pop(0)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(caller=st.sampled_from("ab"), name=st.sampled_from("xyz"), payload=st.sampled_from([b"1", b"2"]))
    def send(self, caller: str, name: str, payload: bytes) -> None:
        key = RequestKey(caller, name)
        self.trim()
        expected = {key: (own, value) for key, own, value, _, _ in self.ended} | self.running
        if key not in expected:
            assert self.known.find(key, payload, self.now_s) is None
            value = object()
            self.known.add(key, payload, value)
            self.running[key] = (payload, value)
        elif expected[key][0] == payload:
            assert self.known.find(key, payload, self.now_s) is expected[key][1]
        else:
            with pytest.raises(AlreadyExists):
                self.known.find(key, payload, self.now_s)

    @rule(data=st.data(), cost=st.integers(0, 60), kept=st.booleans())
    def end(self, data: st.DataObject, cost: int, kept: bool) -> None:
        if self.running:
            key = data.draw(st.sampled_from(sorted(self.running, key=str)))
            payload, value = self.running.pop(key)
            self.known.forget(key, object())  # of another life of that id
            if kept:
                self.known.keep(key, value, cost=cost, now_s=self.now_s)
                self.ended.append((key, payload, value, self.now_s + KEEP_S, cost))
                self.trim()
            else:
                self.known.forget(key, value)

    @invariant()
    def bounded(self) -> None:
        assert self.known._cost <= MAX_COST
        assert sorted(map(id, self.known.running())) == sorted(id(value) for _, value in self.running.values())


TestKnownRequests = KnownRequestsMachine.TestCase
TestKnownRequests.settings = hypothesis_settings(max_examples=30, stateful_step_count=30, deadline=None)
