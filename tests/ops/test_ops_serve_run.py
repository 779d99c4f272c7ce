"""Sending: open loop, closed loop, interruption; and an OpenAI-compatible endpoint that answers well, badly or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument, ResourceExhausted, Unavailable
from pd_ops.bench.serve import http_sender
from pd_ops.bench.serve.http_sender import Endpoint, HttpSender, get_json
from pd_ops.bench.serve.prompts import PromptMaker
from pd_ops.bench.serve.record import Outcome, Recording
from pd_ops.bench.serve.run import Measured, Measurement
from pd_ops.bench.serve.sender import Sampling
from pd_ops.bench.serve.traced import TracedRequest
from support.leaks import assert_nothing_left, until

PROMPTS = PromptMaker(vocab_size=100)


class GatedSender:
    """Answers nothing until its gate is opened."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.started: list[int] = []
        self.most_open = 0
        self._open = 0

    async def send(self, token_ids: Sequence[int], recording: Recording, now: Callable[[], float]) -> None:
        self.started.append(recording.number)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            await self.gate.wait()
            recording.arrivals.append((now(), 1))
        finally:
            self._open -= 1


def no_note(line: str) -> None: ...


def at(*arrivals_s: float) -> list[TracedRequest]:
    return [TracedRequest(arrival_s=at_s, prompt_tokens=4, output_tokens=1) for at_s in arrivals_s]


def measurement(requests: list[TracedRequest], sender: Any, **fields: Any) -> Measurement:
    options = {"concurrency": None, "max_in_flight": 100, "note": lambda text: None} | fields
    return Measurement(requests, sender, PROMPTS, **options)


async def test_open_loop_sends_although_nothing_is_answered() -> None:
    sender = GatedSender()
    running = asyncio.create_task(measurement(at(0, 0.01, 0.02), sender).run(asyncio.Event()))
    await until(lambda: len(sender.started) == 3)
    sender.gate.set()
    measured = await running
    assert [record.outcome for record in measured.records] == [Outcome.FINISHED] * 3
    assert [record.intended_s for record in measured.records] == [0, 0.01, 0.02]
    assert not measured.interrupted


async def test_a_request_without_room_waits_and_its_wait_counts() -> None:
    """The generator has a limit of its own; what waits for it is late from when it was due."""
    sender = GatedSender()
    run = measurement(at(0, 0), sender, max_in_flight=1)
    running = asyncio.create_task(run.run(asyncio.Event()))
    await until(lambda: bool(sender.started))
    await asyncio.sleep(0.05)
    assert sender.started == [0]
    sender.gate.set()
    first, second = (await running).records
    assert second.intended_s == 0
    assert second.lag_ms >= 50
    assert second.timing.ttft_ms is not None
    assert second.timing.ttft_ms >= second.lag_ms
    assert first.lag_ms < second.lag_ms


async def test_closed_loop_waits_for_a_turn() -> None:
    sender = GatedSender()
    running = asyncio.create_task(measurement(at(*[0.0] * 6), sender, concurrency=2).run(asyncio.Event()))
    await until(lambda: len(sender.started) == 2)
    sender.gate.set()
    measured = await running
    assert sender.most_open == 2
    assert len(measured.records) == 6
    assert measured.records[-1].intended_s > 0  # due when it was sent


async def test_an_interruption_keeps_what_was_measured() -> None:
    class Half(GatedSender):
        async def send(self, token_ids: Sequence[int], recording: Recording, now: Callable[[], float]) -> None:
            recording.arrivals.append((now(), 1))
            if recording.number:
                await super().send(token_ids, recording, now)

    sender, stop = Half(), asyncio.Event()
    async with assert_nothing_left():
        running = asyncio.create_task(measurement(at(0, 0, 3600), sender).run(stop))
        await until(lambda: bool(sender.started))
        stop.set()
        measured = await running
    assert measured.interrupted
    assert [(record.number, record.outcome) for record in measured.records] == [
        (0, Outcome.FINISHED), (1, Outcome.UNFINISHED),
    ]
    assert [len(record.arrivals) for record in measured.records] == [1, 1]
    assert measured.span_s < 3600


async def test_refused_and_failed_are_told_apart() -> None:
    class Refusing:
        async def send(self, token_ids: Sequence[int], recording: Recording, now: Callable[[], float]) -> None:
            raise (ResourceExhausted("full") if recording.number else Unavailable("gone"))

    measured: Measured = await measurement(at(0, 0), Refusing()).run(asyncio.Event())
    assert [(record.outcome, record.error) for record in measured.records] == [
        (Outcome.FAILED, "unavailable: gone"), (Outcome.REFUSED, "resource_exhausted: full"),
    ]


@asynccontextmanager
async def answering(
    *parts: bytes, chunked: bool = True, status: str = "200 OK"
) -> AsyncIterator[tuple[str, list[Any]]]:
    """(address, bodies that came) of a server that answers each request with these parts, and then closes."""
    bodies: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        data = await reader.readexactly(length)
        bodies.append(json.loads(data) if data else None)
        coding = "Transfer-Encoding: chunked\r\n" if chunked else ""
        writer.write(f"HTTP/1.1 {status}\r\n{coding}\r\n".encode())
        for part in parts:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n" if chunked else part)
            await writer.drain()
            await asyncio.sleep(0)
        if chunked:
            writer.write(b"0\r\n\r\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}", bodies
    finally:
        server.close()
        await server.wait_closed()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(text: str = "", **fields: Any) -> bytes:
    return event(choices=[{"text": text, **fields}])


async def ask(url: str, **fields: Any) -> Recording:
    recording = Recording(number=3, kind="x", intended_s=0, prompt_tokens=2, asked_tokens=9)
    sender = HttpSender(Endpoint.parse(url), "m", Sampling(seed=4), **fields)
    await sender.send([5, 6], recording, lambda: 1.5)
    return recording


USAGE = event(choices=[], usage={
    "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("chunked", [True, False])
async def test_streamed_completion(chunked: bool) -> None:
    last = choice("", finish_reason="length")
    whole = choice("ab", token_ids=[1, 2]) + choice("", token_ids=[3]) + last + USAGE + DONE
    pieces = [whole[start:start + 7] for start in range(0, len(whole), 7)]  # lines fall across them
    async with assert_nothing_left(), answering(b": a comment\n\n", *pieces, chunked=chunked) as (url, bodies):
        recording = await ask(url)
    assert recording.arrivals == [(1.5, 2), (1.5, 1)]
    assert recording.details == {
        "finish_reason": "length", "num_cached_tokens": 2, "num_told_tokens": 3, "num_accepted": 3, "num_drafted": 4,
    }
    assert bodies[0] == {
        "model": "m", "prompt": [5, 6], "max_tokens": 9, "stream": True, "temperature": 0.0, "seed": 7,
        "ignore_eos": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }


async def test_without_token_ids_a_chunk_with_text_is_a_token() -> None:
    async with answering(choice("a"), choice(""), choice("b"), DONE) as (url, bodies):
        recording = await ask(url, asks_token_ids=False)
    assert recording.arrivals == [(1.5, 1), (1.5, 1)]
    assert "return_token_ids" not in bodies[0]


@pytest.mark.parametrize(("parts", "said"), [
    ([choice("a")], "without [DONE]"),
    ([b"data: {\n\n"], "not JSON"),
    ([b"data: [1]\n\n"], "no JSON object"),
    ([event(error={"message": "worker died"})], "worker died"),
    ([event(choices=[1])], "another shape"),
    ([event(choices=[], usage={"prompt_tokens_details": 7})], "another shape"),
    ([b'data: {"choices": [], "usage": {"completion_tokens": 1e999}}\n\n'], "another shape"),
    ([b"data: " + b"[" * 100_000 + b"\n\n"], "not JSON"),
])
async def test_streams_that_break_are_failures(parts: list[bytes], said: str) -> None:
    async with answering(*parts) as (url, _):
        with pytest.raises(Unavailable) as caught:
            await ask(url)
    assert said in caught.value.message


async def test_refusals_and_errors_by_status() -> None:
    async with answering(b"no room", status="429 Too Many Requests") as (url, _):
        with pytest.raises(ResourceExhausted, match="no room"):
            await ask(url)
    async with answering(b"bad", status="400 Bad Request") as (url, _):
        with pytest.raises(Unavailable, match="HTTP 400: bad"):
            await ask(url)


async def test_what_is_no_http_or_nobody() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match="no HTTP"):
        await ask(f"http://127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    with pytest.raises(Unavailable, match="Errno"):
        await ask(f"http://127.0.0.1:{port}")


async def test_a_cut_connection_is_a_failure() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\ndata:")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    with pytest.raises(Unavailable, match=r"IncompleteReadError|ConnectionResetError"):
        await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    await server.wait_closed()


async def test_an_endpoint_that_never_answers_is_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sender, "CALL_TIMEOUT_S", 0.05)

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(100):
                pass
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    with pytest.raises(Unavailable, match="no answer in"):
        await get_json(Endpoint.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), "/v1/models")
    server.close()
    await server.wait_closed()


async def test_models_are_listed() -> None:
    async with answering(b'{"data": [{"id": "m"}]}') as (url, _):
        assert await get_json(Endpoint.parse(url + "/v1/"), "/v1/models") == {"data": [{"id": "m"}]}
    async with answering(b"<html>") as (url, _):
        with pytest.raises(Unavailable, match="/v1/models"):
            await get_json(Endpoint.parse(url), "/v1/models")


def test_files_are_asked_for_and_what_is_not_had_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 open requests at 1,024 files: what the process itself refused was counted as failed by the endpoint."""
    limits, asked = (1024, 3000), []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: asked.append(new))
    assert http_sender.room_for_connections(4096) == 3000 - http_sender.OTHER_FILES
    assert http_sender.room_for_connections(1000) == 1000
    assert http_sender.room_for_connections(100) == 100
    assert asked == [(3000, 3000), (1256, 3000)]


async def test_long_prompts_are_made_beside_what_is_received() -> None:
    made: list[bool] = []

    class Prompts(PromptMaker):
        def token_ids(self, request: TracedRequest, number: int) -> list[int]:
            made.append(threading.current_thread() is threading.main_thread())
            return [0] * request.prompt_tokens

    sender = GatedSender()
    sender.gate.set()
    requests = [TracedRequest(arrival_s=0.0, prompt_tokens=tokens, output_tokens=1) for tokens in (4096, 4097)]
    run = Measurement(requests, sender, Prompts(vocab_size=10), concurrency=None, max_in_flight=9, note=no_note)
    await run.run(asyncio.Event())
    assert made == [True, False]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=b"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidArgument, match="--url must be http://HOST:PORT"):
        Endpoint.parse(url)


def test_addresses() -> None:
    assert Endpoint.parse("https://host/base/v1/") == Endpoint(host="host", port=443, path="/base", is_tls=True)
    assert Endpoint.parse("http://host:81") == Endpoint(host="host", port=81, path="", is_tls=False)
