"""The load generator at both doors of a router over stub workers: what it learns of itself, sends, and gets back."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.load import LoadPlan
from pd_ops.bench.serve.measure import Described, Endpoints, measure
from pd_ops.bench.serve.record import Outcome
from pd_ops.bench.serve.result import read_result
from pd_ops.bench.serve.run import Measured
from pd_ops.bench.serve.sender import Sampling
from pd_ops.bench.serve.summary import Targets
from pd_ops.output import Document
from support.commands import COMMAND, environment
from support.leaks import until
from support.router_lab import RouterLab, router_lab, settings

PLAN = LoadPlan(kinds=("short",), num_requests=12, rate_per_s=50.0, length_scale=0.1, seed=2)
TOLD = Described(
    checkpoint="demo", engine="pd-relay stub", precision="bf16", max_context=4096, topology={"prefill": 1},
    settings={"stub": True},
)


@pytest.fixture
async def lab() -> AsyncIterator[RouterLab]:
    async with router_lab() as lab:
        yield lab


async def run(endpoints: Endpoints, plan: LoadPlan = PLAN, described: Described = TOLD, **targets: Any
              ) -> tuple[Document, Measured]:
    document, measured, plot = await measure(
        plan, endpoints, described, Sampling(seed=7), Targets(**targets), prompt_salt="s", max_in_flight=100,
        note=lambda text: None,
    )
    assert plot.startswith("<svg")
    return document, measured


async def test_over_grpc(lab: RouterLab) -> None:
    document, measured = await run(Endpoints(address=lab.grpc_address))
    assert {record.outcome for record in measured.records} == {Outcome.FINISHED}
    assert all(record.completion_tokens == record.asked_tokens for record in measured.records)
    assert document["summary"]["good"] == 12
    assert document["identity"]["settings"] == {"stub": True}  # what was told stands over what the router says
    assert document["identity"]["sampling"] == {
        "temperature": 0.0, "seed": 7, "speculate": None, "ignore_eos": True,
    }
    assert document["load"]["prompt_salt"] == "s"
    await lab.assert_no_leaks()


async def test_over_http(lab: RouterLab) -> None:
    url = str(lab.http.base_url)
    document, measured = await run(Endpoints(url=url))
    assert {(record.outcome, record.finish_reason) for record in measured.records} == {(Outcome.FINISHED, "length")}
    assert all(record.completion_tokens == record.asked_tokens for record in measured.records)
    assert document["summary"]["cached_tokens"] is not None
    assert document["summary"]["queue_ms"]["count"] == 0  # HTTP tells none
    assert document["pools"] == []
    await lab.assert_no_leaks()


async def test_the_same_seed_and_salt_send_the_same(lab: RouterLab) -> None:
    """By both doors: the toy model's answers hang on every token of the prompt."""
    async with router_lab() as other:
        first, _ = await run(Endpoints(address=lab.grpc_address))
        second, _ = await run(Endpoints(url=str(other.http.base_url)))
        prompts = [sorted(tuple(request.token_ids) for request in one.prefill[0].requests) for one in (lab, other)]
    assert prompts[0] == prompts[1]
    assert first["load"] == second["load"]


async def test_refusals_are_counted_at_both_doors() -> None:
    async with router_lab(settings(router={"max_running_requests": 1, "max_waiting_requests": 0})) as lab:
        plan = LoadPlan(kinds=("short",), num_requests=40, rate_per_s=4000.0, variation=0.0, length_scale=0.1)
        for endpoints in (Endpoints(address=lab.grpc_address), Endpoints(url=str(lab.http.base_url))):
            document, measured = await run(endpoints, plan)
            summary = document["summary"]
            assert summary["refused"] > 0, [record.error for record in measured.records]
            assert summary["finished"] + summary["refused"] == 40
            assert summary["good"] == summary["finished"]
        await lab.assert_no_leaks()


async def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """The command itself, at an endpoint that answers the first request and then nobody."""
    num_asked, is_answered = 0, False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked, is_answered
        num_asked += 1
        number = num_asked
        await reader.readuntil(b"\r\n\r\n")
        if number == 1:
            writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"token_ids": [7]}]}\n\ndata: [DONE]\n\n')
            writer.write_eof()
        await reader.read()  # until the client goes away
        is_answered |= number == 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port, out = server.sockets[0].getsockname()[1], tmp_path / "result"
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--served-model", "m", "--checkpoint", "demo",
        "--engine", "stub", "--precision", "bf16", "--max-context", "4096", "--topology", "prefill=1",
        "--engine-setting", "a=b", "--requests", "50", "--rate", "20", "--out", str(out), "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=environment(),
    )
    try:
        await until(lambda: num_asked >= 3 and is_answered)
        process.send_signal(signal.SIGINT)
        stdout, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        server.close()
    assert process.returncode == 130
    document = json.loads(stdout)
    assert document["interrupted"]
    assert document["summary"]["finished"] == 1
    assert document["summary"]["unfinished"] >= 2
    assert read_result(out).document == document


async def test_an_http_endpoint_has_to_be_described(lab: RouterLab) -> None:
    url = str(lab.http.base_url)
    with pytest.raises(InvalidArgument, match="--url needs --checkpoint"):
        await run(Endpoints(url=url), described=Described())
    with pytest.raises(InvalidArgument, match="--max-context"):
        await run(Endpoints(url=url), described=Described(checkpoint="demo"))
    with pytest.raises(InvalidArgument, match=r"engine \(--engine\), precision \(--precision\)"):
        await run(Endpoints(url=url), described=Described(checkpoint="demo", max_context=100))
    with pytest.raises(InvalidArgument, match="not both"):
        await run(Endpoints(url=url, grpc_port=1))
    assert lab.prefill[0].requests == []  # nothing was sent
