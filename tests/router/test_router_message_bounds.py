"""What the gRPC door refuses before it is parsed."""

from __future__ import annotations

import random

import grpc
import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import InvalidArgument
from pd_engine.service.client import typed_error
from pd_router.message_bounds import MAX_DEPTH, MAX_MESSAGE_BYTES, MessageBounds
from support.router_lab import RouterLab, router_lab

GENERATE = "/pdrelay.v1.PdRelay/Generate"
ABORT = "/pdrelay.v1.PdRelay/Abort"
SERVICE = api.DESCRIPTOR.services_by_name["PdRelay"]


def fits(data: bytes, max_fields: int, path: str = GENERATE) -> bool:
    bounds = MessageBounds.of_context(SERVICE, max_context_length=10, max_token_chars=1)
    try:
        MessageBounds(max_bytes=bounds.max_bytes, max_fields=max_fields, messages=bounds.messages).check(path, data)
    except InvalidArgument:
        return False
    return True


def chat(*messages: api.ChatMessage) -> api.GenerateRequest:
    return api.GenerateRequest(chat=api.ChatInput(messages=messages))


def length_delimited(number: int, data: bytes) -> bytes:
    size, varint = len(data), b""
    while size >= 0x80:
        varint += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + varint + bytes([size]) + data


def test_fields_are_counted_wherever_they_are() -> None:
    messages = [api.ChatMessage(role="user", content="x" * 300)] * 3
    data = chat(*messages).SerializeToString()
    assert fits(data, 10)  # the chat, three messages, role and content of each
    assert not fits(data, 9)
    empty = length_delimited(4, b"\x0a\x00" * 30)
    assert fits(empty, 31)
    assert not fits(empty, 30)
    assert not fits(b"\x4a\x00" * 40, 39)  # one field, over and over
    assert not fits(b"\xfa\x07\x00" * 40, 39)  # one that nobody knows


def test_text_and_packed_ids_are_one_field() -> None:
    """However much they look like messages inside."""
    ids = api.GenerateRequest(tokenized=api.TokenizedInput(input_ids=[10, 0] * 500)).SerializeToString()
    assert fits(ids, 2)
    assert fits(api.GenerateRequest(text="\x0a\x00" * 500).SerializeToString(), 1)
    assert not fits(api.AbortRequest(request_ids=["a"] * 50).SerializeToString(), 49, ABORT)
    assert fits(b"\x0a\x00" * 500, 1, "/another/call")


@pytest.mark.parametrize(
    "data", [b"\x80" * 5000, b"\x0a\xff", b"\x0a" + b"\xff" * 99, b"\x25" * 3, b"\x22\x7f\x0a", b"\x0f"]
)
def test_what_is_no_message_is_for_the_parser_to_refuse(data: bytes) -> None:
    assert fits(data, 3)


def test_random_bytes_never_fail_otherwise() -> None:
    rng = random.Random(3)
    for _ in range(2_000):
        fits(rng.randbytes(rng.randrange(200)), rng.randrange(20))


def test_the_bounds_of_a_context() -> None:
    bounds = MessageBounds.of_context(SERVICE, max_context_length=4096, max_token_chars=21)
    text = api.GenerateRequest(text="\U0001f600" * 21 * 4096).SerializeToString()
    ids = api.GenerateRequest(tokenized=api.TokenizedInput(input_ids=[2**32 - 1] * 4096)).SerializeToString()
    aborts = api.AbortRequest(request_ids=[f"{i:0128}" for i in range(10_000)]).SerializeToString()
    for path, data in ((GENERATE, text), (GENERATE, ids), (ABORT, aborts)):
        assert len(data) <= bounds.max_bytes < MAX_MESSAGE_BYTES
        bounds.check(path, data)
    large = MessageBounds.of_context(SERVICE, max_context_length=163_840, max_token_chars=500)
    assert large.max_bytes == MAX_MESSAGE_BYTES


def test_depth() -> None:
    """No message of the API lies so deep; what does is refused and not followed."""
    assert max(_depth(method.input_type, 0) for method in SERVICE.methods) < MAX_DEPTH


def _depth(descriptor: object, depth: int) -> int:
    inner = [field.message_type for field in descriptor.fields if field.message_type is not None]  # type: ignore[attr-defined]
    return max((_depth(each, depth + 1) for each in inner), default=depth)


async def call(lab: RouterLab, method: str, data: bytes) -> None:
    async with grpc.aio.insecure_channel(
        lab.grpc_address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        try:
            if method == GENERATE:
                async for _ in channel.unary_stream(method)(data):
                    pass
            else:
                await channel.unary_unary(method)(data)
        except grpc.aio.AioRpcError as error:
            raise typed_error(error) from None


async def test_the_door_refuses_both_kinds_of_too_much() -> None:
    async with router_lab() as lab:
        with pytest.raises(InvalidArgument, match="at most 36864 fields"):
            await call(lab, GENERATE, length_delimited(4, b"\x0a\x00" * 1_000_000))
        with pytest.raises(InvalidArgument, match="at most 36864 fields"):
            await call(lab, ABORT, b"\x0a\x00" * 100_000)
        with pytest.raises(InvalidArgument, match="the request is too long"):
            await call(lab, GENERATE, api.GenerateRequest(text="x" * 20_000_000).SerializeToString())
        assert (await lab.generate()).output_ids
