"""Fuzz of both doors: whatever is sent gets one of the stated answers, and the workers and the next request are well.

HTTP bodies are drawn from the schemas that the door itself publishes, with wrong values among the right ones; gRPC
requests are drawn field by field, and mutilated on the wire.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from pd_engine.contracts import api_pb2 as api
from support.router_lab import PROMPT, RouterLab, router_lab, settings
from support.toy_model import toy_generate

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
HTTP_ANSWERS = {200, 400, 404, 409, 429}
GRPC_ANSWERS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"}
TEXTS = ["", "a", "naïve ☃", "<｜User｜>", "\x00", "a\ud800", "x" * 5_000, "demo", "user", "assistant", "r1", "r2"]
INTEGERS = [-1, 0, 1, 2, 3, 7, 20, 128, 129, 4095, 4096, 2**31, 2**32, 2**64, -(2**63), 10**400]
FLOATS = [-1.0, 0.0, 0.5, 1.0, 2.0, 1e-40, 1e300]
CALLS = ("Generate", "Explain", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads")
NUM_FEW, NUM_MANY = 150, 5_000  # requests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[RouterLab]:
    async with router_lab(settings(router={"max_running_requests": 16, "request_keep_ms": 100})) as lab:
        yield lab


async def assert_well(lab: RouterLab) -> None:
    """No worker was lost, nothing is held, and the next request is served."""
    await lab.assert_no_leaks()
    assert [link.state.value for link in lab.router._registry.links()] == ["ready", "ready"]
    assert list((await lab.generate()).output_ids) == toy_generate(PROMPT, 8)


def draw_value(rng: random.Random, schema: dict[str, Any], depth: int = 0) -> Any:
    """Something for a JSON schema, most of the time of its type."""
    if rng.random() < 0.1 or depth > 4:
        return rng.choice([None, True, rng.choice(TEXTS), rng.choice(INTEGERS), rng.choice(FLOATS), [], {}, [[]]])
    if "anyOf" in schema:
        return draw_value(rng, rng.choice(schema["anyOf"]), depth + 1)
    match schema.get("type"):
        case "string":
            return rng.choice(TEXTS)
        case "integer":
            return rng.choice(INTEGERS[:5] if rng.random() < 0.7 else INTEGERS)
        case "number":
            return rng.choice(FLOATS + INTEGERS)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            items = schema.get("items", {})
            return [draw_value(rng, items, depth + 1) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        case "object":
            return {rng.choice(["5", "12", "x"]): rng.choice(FLOATS) for _ in range(rng.randrange(3))}
        case "null":
            return None
    return rng.choice([rng.choice(TEXTS), PROMPT, [rng.choice(TEXTS)], [PROMPT, [9]], rng.choice(INTEGERS)])


def draw_body(rng: random.Random, schema: dict[str, Any]) -> bytes:
    properties = schema["properties"]
    names = [*schema.get("required", []), *rng.sample(sorted(properties), rng.randrange(min(4, len(properties)) + 1))]
    body: dict[str, Any] = {name: draw_value(rng, properties[name]) for name in names}
    if "messages" in body and rng.random() < 0.8:
        body["messages"] = [{"role": rng.choice(["user", "system", "x"]), "content": rng.choice(TEXTS)}]
    if "max_tokens" in properties and rng.random() < 0.8:
        body["max_tokens"] = rng.choice([1, 3, 8])
    if rng.random() < 0.05:
        body[rng.choice(["nothing", "tools", "echo"])] = rng.choice(TEXTS)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(rng.randrange(4)) + data[at + rng.randrange(4) :]
    return data


async def fuzz_http(lab: RouterLab, seed: int, count: int) -> None:
    rng = random.Random(seed)
    document = (await lab.http.get("/openapi.json")).json()
    schemas = [
        document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] for path in PATHS
    ]

    async def send(path: str, data: bytes) -> None:
        response = await lab.http.post(path, content=data, headers={"content-type": "application/json"})
        assert response.status_code in HTTP_ANSWERS, (path, data, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"], (path, data)

    for _ in range(count // 10):
        chosen = rng.choices(range(len(PATHS)), weights=[4, 4, 1, 1], k=10)
        await asyncio.gather(*(send(PATHS[i], draw_body(rng, schemas[i])) for i in chosen))
    await assert_well(lab)


def fill(rng: random.Random, message: Message, depth: int = 0) -> None:
    """Some of a message's fields, most of them small."""
    descriptor: Descriptor = message.DESCRIPTOR
    for field in rng.sample(list(descriptor.fields), min(len(descriptor.fields), rng.choice([0, 1, 2, 3]))):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[rng.choice([0, 5, 4096, 2**32 - 1])] = rng.choice([-100.0, 0.5, 1e30])
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(rng.randrange(3)):
                    fill(rng, inner.add(), depth + 1)
            else:
                inner.SetInParent()
                fill(rng, inner, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw_scalar(rng, field) for _ in range(rng.randrange(4)))
        else:
            setattr(message, field.name, draw_scalar(rng, field))


def draw_scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice([text for text in TEXTS if "\ud800" not in text])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice([*FLOATS[:-1], float("nan"), float("inf")])
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return rng.choice([-(2**31), -1, 0, 5, 2**31 - 1] if signed else [0, 1, 3, 8, 4096, 2**32 - 1])


def draw_call(rng: random.Random) -> tuple[str, bytes]:
    """A call's name, and its request on the wire."""
    name = rng.choice(CALLS + ("Generate",) * 6)
    message = api.DESCRIPTOR.services_by_name["PdRelay"].methods_by_name[name].input_type._concrete_class()
    if isinstance(message, api.GenerateRequest) and rng.random() < 0.8:
        message.tokenized.input_ids.extend(PROMPT)
        message.sampling_params.max_tokens = rng.choice([1, 3, 8])
    fill(rng, message)
    data: bytes = message.SerializeToString()
    if rng.random() < 0.2:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.randbytes(rng.randrange(5)) + data[at + rng.randrange(3) :]
    return name, data


async def fuzz_grpc(lab: RouterLab, seed: int, count: int) -> None:
    rng = random.Random(seed)
    async with grpc.aio.insecure_channel(lab.grpc_address) as channel:

        async def send(name: str, data: bytes) -> None:
            path = f"/pdrelay.v1.PdRelay/{name}"
            make = channel.unary_stream if name == "Generate" else channel.unary_unary
            call: Any = make(path, request_serializer=bytes, response_deserializer=bytes)(data, timeout=60)
            try:
                if name == "Generate":
                    async for _ in call:
                        pass
                else:
                    await call
                answer = "OK"
            except grpc.aio.AioRpcError as error:
                answer = error.code().name
            assert answer in GRPC_ANSWERS, (name, data, answer)

        for _ in range(count // 10):
            await asyncio.gather(*(send(*draw_call(rng)) for _ in range(10)))
    await assert_well(lab)


async def test_http_bodies_of_all_kinds(lab: RouterLab) -> None:
    await fuzz_http(lab, 1, NUM_FEW)


async def test_grpc_requests_of_all_kinds(lab: RouterLab) -> None:
    await fuzz_grpc(lab, 2, NUM_FEW)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_many_of_all_kinds(lab: RouterLab) -> None:
    await fuzz_http(lab, 3, NUM_MANY)
    await fuzz_grpc(lab, 4, NUM_MANY)
