"""The router as a process: what it imports, what it weighs, how it starts and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import api_pb2_grpc
from pd_engine.service.secret import SECRET_ENVIRONMENT
from pd_router.__main__ import main
from support.router_lab import SECRET
from support.stub_worker import StubWorker
from support.toy_model import toy_generate

SETTINGS = json.dumps({"router": {"grpc_port": 0, "http_port": 0}})
MAX_RSS_BYTES = 200 * 1024 * 1024


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import pd_router.server, pd_router.__main__, sys;"
        "print([m for m in ('torch', 'ray', 'transformers', 'pd_kernels', 'kv_transfer', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "secret", "message"),
    [
        (["--settings-json", "{"], SECRET, "settings"),
        (["--settings-json", '{"rooter": {}}'], SECRET, "settings"),
        (["--settings-json", '{"model": "/no/such/model"}'], SECRET, "no model"),
        (["--workers-json", "7"], SECRET, "workers must be"),
        (["--workers-json", '[{"worker_id": "x"}]'], SECRET, "workers must be"),
        ([], "", "secret"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], secret: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECRET_ENVIRONMENT, secret)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_a_port_in_use_exits_with_2_and_no_traceback() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = {"router": {"grpc_port": 0, "http_port": taken.getsockname()[1]}}
        done = subprocess.run(
            [sys.executable, "-m", "pd_router", "--settings-json", json.dumps(settings)],
            capture_output=True,
            text=True,
            env={**os.environ, SECRET_ENVIRONMENT: SECRET},
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot listen on" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, SECRET_ENVIRONMENT: SECRET, "PYTHONPATH": str(Path.cwd())}


async def start(environment: dict[str, str], *arguments: str) -> tuple[asyncio.subprocess.Process, dict[str, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pd_router",
        "--settings-json",
        SETTINGS,
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    return process, json.loads(await process.stdout.readline())


async def test_a_router_process_serves_weighs_little_and_ends_on_sigterm(environment: dict[str, str]) -> None:
    stubs = [StubWorker("p", "prefill", secret=SECRET), StubWorker("d", "decode", secret=SECRET)]
    for stub in stubs:
        await stub.start()
    workers = [{"worker_id": stub.worker_id, "role": stub.role, "address": stub.address} for stub in stubs]
    process, addresses = await start(environment, "--follow-stdin", "--workers-json", "[]")
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(workers).encode() + b"\nnot json\n")
        assert json.loads(await process.stdout.readline()) == {"workers": 2}
        assert json.loads(await process.stdout.readline())["error"]["code"] == "invalid_argument"
        async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
            api_stub = api_pb2_grpc.PdRelayStub(channel)
            for i in range(20):
                prompt = [5 + i, 6, 7]
                request = api.GenerateRequest(
                    tokenized=api.TokenizedInput(input_ids=prompt),
                    sampling_params=api.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
                )
                [response] = [response async for response in api_stub.Generate(request)]
                assert list(response.complete.output_ids) == toy_generate(prompt, 20)
            info = await api_stub.GetServerInfo(api.GetServerInfoRequest())
        assert info.router_pid == process.pid
        assert 0 < info.router_rss_bytes < MAX_RSS_BYTES
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for stub in stubs:
            await stub.kill()


async def test_a_followed_router_ends_with_its_stdin(environment: dict[str, str]) -> None:
    process, addresses = await start(environment, "--follow-stdin")
    assert set(addresses) == {"grpc", "http"}
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0
