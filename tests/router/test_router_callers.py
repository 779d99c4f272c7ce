"""API keys: who is let in at both doors, and how much each may ask for."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from pd_engine.hashing import block_hashes
from pd_engine.service.client import typed_error
from pd_router.callers import ANYONE, Caller, CallerLimits, Callers
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate

ALICE, BOB = "sk-alice-0123456789", "sk-bob-9876543210"
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
PROTECTED = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics"),
    ("GET", "/openapi.json"), ("GET", "/nothing"),
]

WRONG = [
    None, "", "Bearer", "Basic " + ALICE, "Bearer nobody", ALICE, "Bearer " + "x" * 2000, f"Bearer {ALICE} x",
    "Bearer " + hashlib.sha256(ALICE.encode()).hexdigest(),
]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_file(folder: Path, **limits: Any) -> str:
    """Of Alice, with limits, and Bob."""
    path = folder / "keys.json"
    keys = [{"name": "alice", "sha256": digest(ALICE), **limits}, {"name": "bob", "sha256": digest(BOB)}]
    path.write_text(json.dumps({"keys": keys}))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def over_grpc(lab: RouterLab, key: str | None, **fields: Any) -> api.GenerateComplete:
    metadata = () if key is None else tuple(bearer(key).items())
    try:
        [response] = [one async for one in lab.api.Generate(lab.request(**fields), metadata=metadata)]
    except grpc.aio.AioRpcError as error:
        raise typed_error(error) from None
    complete: api.GenerateComplete = response.complete
    return complete


async def test_without_a_key_nothing_is_read(tmp_path: Path) -> None:
    async with router_lab(settings(router={"api_keys": key_file(tmp_path)})) as lab:
        for authorization in WRONG:
            await assert_shut(lab, {} if authorization is None else {"authorization": authorization})


async def assert_shut(lab: RouterLab, headers: dict[str, str]) -> None:
    for method, path in PROTECTED:
        response = await lab.http.request(method, path, headers=headers, content=b"no json")
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        assert "nobody" not in response.text
    for path in ("/health", "/live"):
        assert (await lab.http.get(path, headers=headers)).status_code == 200
    metadata = tuple(headers.items())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lab.api.GetModelInfo(api.GetModelInfoRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in lab.api.Generate(api.GenerateRequest(), metadata=metadata)]
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_with_a_key_both_doors_serve_and_the_log_has_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pd_router")
    async with router_lab(settings(router={"api_keys": key_file(tmp_path)})) as lab:
        text = "a text that nobody else is to read"
        body = {**BODY, "prompt": text, "request_id": "r1"}
        reply = await lab.http.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert reply.status_code == 200
        assert list((await over_grpc(lab, BOB)).output_ids) == toy_generate(PROMPT, 8)
        await lab.assert_no_leaks()
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "pd_router.request_log"]
    assert [(line["key"], line["end"], line["completion_tokens"]) for line in lines] == [
        ("alice", "length", 8), ("bob", "length", 8)
    ]
    assert lines[0]["request_id"] == "r1"
    assert 0 <= lines[0]["first_token_ms"] <= lines[0]["ms"]
    everything = "\n".join(record.getMessage() for record in caplog.records)
    for secret in (text, reply.json()["choices"][0]["text"], ALICE, BOB, digest(ALICE)):
        assert secret not in everything


async def test_request_ids_belong_to_their_callers(tmp_path: Path) -> None:
    async with router_lab(settings(router={"api_keys": key_file(tmp_path)})) as lab:
        assert list((await over_grpc(lab, ALICE, request_id="one")).output_ids) == toy_generate(PROMPT, 8)
        assert list((await over_grpc(lab, BOB, request_id="one", max_tokens=3)).output_ids) == toy_generate(PROMPT, 3)
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(over_grpc(lab, ALICE, request_id="two"))
        await eventually(lambda: lab.router.num_running == 1)
        request = api.AbortRequest(request_ids=["two"])
        reply = await lab.api.Abort(request, metadata=tuple(bearer(BOB).items()))
        assert list(reply.unknown_request_ids) == ["two"]
        gate.set()
        assert (await running).finish_reason == "length"


async def test_cached_blocks_belong_to_their_keys(tmp_path: Path) -> None:
    """Whatever salt a client names, workers are told one that is its key's; `Explain` looks by that too."""
    shared = Caller(name="carol", sha256=digest("carol"), cache="team")
    path = tmp_path / "keys.json"
    keys = [{"name": "alice", "sha256": digest(ALICE)}, {"name": "bob", "sha256": digest(BOB), "cache": "team"}]
    path.write_text(json.dumps({"keys": keys}))
    prompt = list(range(100, 148))
    async with router_lab(settings(router={"api_keys": str(path)})) as lab:
        salts = {}
        for key in (ALICE, BOB):
            for salt in ("", "key alice", "s"):
                lab.forget()
                await over_grpc(lab, key, prompt=prompt, cache_salt=salt)
                told = {one.cache_salt for stub in lab.stubs for one in stub.requests if hasattr(one, "cache_salt")}
                [salts[key, salt]] = told
        assert len(set(salts.values())) == 6
        assert salts[BOB, "s"] == shared.salt("s")  # keys with one cache share it
        lab.prefill[0].tell_cache(stored=block_hashes(prompt, fingerprint="ab" * 16, salt=salts[ALICE, "s"]))
        await eventually(lambda: lab.router.prefix_index.num_entries > 0)
        for key, num_held in ((ALICE, 3), (BOB, 0)):
            request = lab.request(prompt, cache_salt="s")
            report = await lab.api.Explain(request, metadata=tuple(bearer(key).items()))
            assert max(c.num_held_blocks for c in report.candidates if c.part == "prefill") == num_held


async def test_a_key_may_be_no_more_urgent_than_it_may(tmp_path: Path) -> None:
    async with router_lab(settings(router={"api_keys": key_file(tmp_path, min_priority=-1)})) as lab:
        with pytest.raises(InvalidArgument, match="priority must be at least -1 with this API key, got -2"):
            await over_grpc(lab, ALICE, priority=-2)
        assert (await over_grpc(lab, ALICE, priority=-1)).output_ids
        assert (await over_grpc(lab, BOB, priority=-2)).output_ids


async def test_a_caller_has_so_many_requests_at_once(tmp_path: Path) -> None:
    async with router_lab(settings(router={"api_keys": key_file(tmp_path, max_running_requests=2)})) as lab:
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        running = [asyncio.create_task(over_grpc(lab, ALICE)) for _ in range(2)]
        await eventually(lambda: lab.router.num_running == 2)
        refused = await lab.http.post("/v1/completions", json=BODY, headers=bearer(ALICE))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "this API key has 2 choices running; it may have 2" in refused.json()["error"]["message"]
        others = asyncio.create_task(over_grpc(lab, BOB))
        gate.set()
        for task in (*running, others):
            assert list((await task).output_ids) == toy_generate(PROMPT, 8)
        await eventually(lambda: lab.router.num_running == 0)
        assert (await over_grpc(lab, ALICE)).output_ids
        with pytest.raises(InvalidArgument, match="the request has 3 choices; this API key may have 2 at once"):
            await over_grpc(lab, ALICE, n=3)


async def test_a_caller_has_so_many_tokens_a_minute(tmp_path: Path) -> None:
    async with router_lab(settings(router={"api_keys": key_file(tmp_path, tokens_per_minute=10)})) as lab:
        await over_grpc(lab, ALICE)
        await eventually(lambda: lab.router.num_running == 0)  # what was generated counts at the end
        with pytest.raises(ResourceExhausted, match="this API key has used its 10 tokens a minute") as caught:
            await over_grpc(lab, ALICE)
        assert 0 < (caught.value.retry_after_ms or 0) <= 60_000
        assert (await over_grpc(lab, BOB)).output_ids


def test_files_that_are_no_keys(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot read the API keys in .*: No such file"):
        Callers.load(str(tmp_path / "absent"))
    good = {"name": "a", "sha256": "0" * 64}
    for document, message in (
        ({}, "keys: Field required"),
        ({"keys": []}, "keys: List should have at least 1 item"),
        ({"keys": [{**good, "sha256": ALICE}]}, "keys.0.sha256: String should match"),
        ({"keys": [{**good, "name": "a b"}]}, "keys.0.name"),
        ({"keys": [{**good, "token": ALICE}]}, "keys.0.token: Extra inputs"),
        ({"keys": [{**good, "tokens_per_minute": 0}]}, "keys.0.tokens_per_minute"),
        ({"keys": [{**good, "min_priority": -1001}]}, "keys.0.min_priority"),
        ({"keys": [{**good, "cache": "a/b"}]}, "keys.0.cache"),
        ({"keys": [good, {**good, "name": "b"}]}, "each key must have a sha256 of its own"),
        ({"keys": [good, {**good, "sha256": "1" * 64}]}, "each key must have a name of its own"),
    ):
        path = tmp_path / "keys.json"
        path.write_text(json.dumps(document))
        with pytest.raises(InvalidArgument, match=message) as caught:
            Callers.load(str(path))
        assert ALICE not in caught.value.message


def test_without_keys_everybody_is_let_in() -> None:
    assert Callers.load(None).of(None) is ANYONE
    with pytest.raises(Unauthenticated):
        Callers([Caller(name="a", sha256=digest(ALICE))]).of(None)


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    rate=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500), st.integers(0, 500)), max_size=30),
)
def test_a_callers_tokens_come_back_evenly(rate: int, steps: list[tuple[float, int, int]]) -> None:
    """Over any stretch of time no more is let in than the rate and one request beyond it; and a hint is enough."""
    caller, limits, now_s = Caller(name="a", sha256="0" * 64, tokens_per_minute=rate), CallerLimits(), 0.0
    used, largest = 0, 0
    for wait_s, asked, generated in steps:
        prompt = asked
        now_s += wait_s
        try:
            limits.admit(caller, num_choices=1, num_prompt_tokens=prompt, now_s=now_s)
        except ResourceExhausted as error:
            now_s += (error.retry_after_ms or 0) / 1000 + 0.001
            limits.admit(caller, num_choices=1, num_prompt_tokens=0, now_s=now_s)
            prompt = 0
        limits.note_end(caller, num_generated=generated, now_s=now_s)
        used += prompt + generated
        largest = max(largest, prompt + generated)
        assert used <= rate + now_s * rate / 60 + largest + 1
