"""Bad input at the gRPC door: a typed error that says what was wrong, and the next request works."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import InvalidArgument, NotFound
from support.router_lab import PROMPT, RouterLab, router_lab, settings
from support.toy_model import toy_generate

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_lab() -> AsyncIterator[RouterLab]:
    async with router_lab(settings()) as lab:
        yield lab


@pytest_asyncio.fixture(loop_scope="module")
async def lab(shared_lab: RouterLab) -> AsyncIterator[RouterLab]:
    """As if it were new."""
    shared_lab.forget()
    yield shared_lab
    assert list((await shared_lab.generate()).output_ids) == toy_generate(PROMPT, 8)
    await shared_lab.assert_no_leaks()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"temperature": -0.5}, "temperature must be"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": math.nan}, "top_p must be"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"top_k": -7}, "top_k must be"),
        ({"stop": [""] * 20_000}, "at most 16 stop strings are allowed, got 20000"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": math.nan}, "min_p must be"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.01, 100\], got 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\]"),
        ({"presence_penalty": math.nan}, "presence_penalty must be"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty must be"),
        ({"logit_bias": {5: 100.5}}, r"logit_bias must be in \[-100, 100\], got 100.5 for token 5"),
        ({"logit_bias": {5: math.nan}}, "logit_bias must be in"),
        ({"logit_bias": {4096: 1.0}}, r"token ids of logit_bias must be in \[0, 4096\), got 4096"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "at most 1024 tokens in logit_bias are allowed, got 2000"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens must be in \[0, 8\], which is max_tokens, got 9"),
        ({"min_tokens": 2**32 - 1}, "min_tokens must be in"),
        ({"stop_token_ids": [1] * 1_000_000}, "at most 64 stop_token_ids are allowed, got 1000000"),
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"max_tokens": 2**32 - 1}, "max_tokens must be at most 4091"),
        ({"stop": [""]}, "stop string"),
        ({"stop": ["x"] * 100}, "stop strings"),
        ({"stop": ["x" * 10_000]}, "stop string"),
        ({"stop_token_ids": [4096]}, "stop_token_ids must be in"),
        ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs must be"),
        ({"speculate": 100}, "speculate must be"),
        ({"n": 129}, r"n must be in \[1, 128\], got 129"),
        ({"n": 0}, "n must be in"),
        ({"request_id": "x" * 500}, "request_id must be"),
        ({"request_id": "a b"}, "request_id must be"),
        ({"request_id": "é"}, "request_id must be"),
        ({"cache_salt": "x" * 500}, "cache_salt has at most"),
        ({"priority": 1001}, r"priority must be in \[-1000, 1000\], lower is earlier, got 1001"),
        ({"priority": -(2**31)}, "priority must be in"),
        ({"parse_special_tokens": True}, "parse_special_tokens and add_bos are for"),
        ({"tokenized": api.TokenizedInput()}, "at least one token"),
        ({"tokenized": api.TokenizedInput(input_ids=[4096])}, r"prompt token ids must be in \[0, 4096\), got 4096"),
        ({"tokenized": api.TokenizedInput(input_ids=[2**32 - 1])}, "prompt token ids must be in"),
        ({"tokenized": api.TokenizedInput(input_ids=[5] * 1_000_000)}, "the prompt has 1000000 tokens"),
        ({"text": ""}, "the prompt must not be empty"),
        ({"text": "x" * 2_000_000}, "the prompt has 2000000 characters"),
        ({"text": "word " * 10_000}, "the prompt has [0-9]+ tokens"),
        ({"chat": api.ChatInput()}, "messages must not be empty"),
        ({"chat": api.ChatInput(messages=[api.ChatMessage(role="tool", content="x")])}, "role must be one of"),
        ({"chat": api.ChatInput(messages=[api.ChatMessage(role="user")] * 5000)}, "at most 4096 messages"),
        ({"chat": api.ChatInput(messages=[api.ChatMessage()] * 10_000)}, "at most 4096 messages"),
    ],
)
async def test_a_typed_error(lab: RouterLab, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        await lab.generate(**fields)
    assert lab.prefill[0].calls == lab.decode[0].calls == []


async def test_no_prompt_at_all(lab: RouterLab) -> None:
    with pytest.raises(InvalidArgument, match="a prompt is needed"):
        await lab.complete(api.GenerateRequest())


@pytest.mark.parametrize("wish", [{"prefill_worker": "nobody"}, {"decode_worker": "prefill-0"}])
async def test_a_worker_that_does_not_exist(lab: RouterLab, wish: dict[str, str]) -> None:
    with pytest.raises(NotFound, match="there is no such worker"):
        await lab.generate(placement=api.Placement(**wish))


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"\xd2\x0f\x01x", "GenerateRequest has no field number 250"),
        (api.GenerateRequest(text="x").SerializeToString() + b"\x2a\x05\xd2\x0f\x02xy", "SamplingParams has no field"),
    ],
)
async def test_unknown_fields(lab: RouterLab, data: bytes, where: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw_generate(lab, data)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert where in (caught.value.details() or "")


@pytest.mark.parametrize("method", ["GetModelInfo", "GetServerInfo", "GetLoads", "Abort"])
async def test_unknown_fields_of_the_other_calls(lab: RouterLab, method: str) -> None:
    async with grpc.aio.insecure_channel(lab.grpc_address) as channel:
        call = channel.unary_unary(
            f"/pdrelay.v1.PdRelay/{method}", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xd2\x0f\x01x")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{method}Request has no field number 250" in (caught.value.details() or "")


async def test_text_that_is_not_utf8(lab: RouterLab) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw_generate(lab, b"\x1a\x02\xff\xfe")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in (caught.value.details() or "")


async def test_random_bytes_get_a_status_and_no_crash(lab: RouterLab) -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(300):
        data = rng.randbytes(rng.randrange(0, 40))
        try:
            await raw_generate(lab, data)
            seen.add("OK")
        except grpc.aio.AioRpcError as error:
            seen.add(error.code().name)
    assert seen <= {"INVALID_ARGUMENT", "OK"}, seen


async def test_more_than_a_message_may_have(lab: RouterLab) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw_generate(lab, b"\x00" * (33 * 1024 * 1024))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_too_many_aborts(lab: RouterLab) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lab.api.Abort(api.AbortRequest(request_ids=["x"] * 20_000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def raw_generate(lab: RouterLab, data: bytes) -> None:
    async with grpc.aio.insecure_channel(
        lab.grpc_address, options=[("grpc.max_send_message_length", 64 * 1024 * 1024)]
    ) as channel:
        method = channel.unary_stream(
            "/pdrelay.v1.PdRelay/Generate", request_serializer=bytes, response_deserializer=bytes
        )
        async for _ in method(data, timeout=30):
            pass
