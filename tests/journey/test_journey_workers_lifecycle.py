"""Workers start, drain, end and crash: exit codes, answers, memory, and nothing heavy imported."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker.worker import DecodeWorker
from kv_transfer.surroundings import ProcessSurroundings
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import Internal, InvalidArgument, Unavailable
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from pd_engine.settings import Settings, load_settings
from pd_engine.steps.forward import THE_MODEL, Steps
from prefill_worker.worker import PrefillWorker
from support.cluster import ROOT, SECRET, worker_processes
from support.player import CALL_TIMEOUT_S, Copy, Player, new_journey, sampling_message

SETTINGS: dict[str, Any] = {"engine": {"cache_mib": 8}}
MIB = 1024 * 1024
MAX_OWN_MIB = 350


def sampling(max_tokens: int) -> pb.Sampling:
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return sampling_message(params, [], 1)


async def health(channel: grpc.aio.Channel) -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
    return int(reply.status)


async def test_sigterm_finishes_what_runs_takes_nothing_new_and_exits_0(tmp_path: Path) -> None:
    async with worker_processes(SETTINGS, tmp_path) as ([prefill], [decode]):
        player = Player(prefill.address, decode.address, SECRET)
        await player.open()
        check_identity(await player.prefill_worker.Info(pb.InfoRequest()), prefill.pid, "prefill")
        check_identity(await player.decode_worker.Info(pb.InfoRequest()), decode.pid, "decode")
        for load in await player.loads():
            check_memory(load)
        journey_id = new_journey()
        running = asyncio.create_task(player.run([5, 6, 7], sampling(400), journey_id=journey_id))
        await player.until(journey_id, lambda copy: len(copy.tokens) > 1)
        decode.signal(signal.SIGTERM)
        prefill.signal(signal.SIGTERM)
        refusal = await refusal_while_draining(player)
        assert isinstance(refusal, Unavailable)
        assert len((await running).token_ids) == 400
        assert await asyncio.gather(prefill.process.wait(), decode.process.wait()) == [0, 0]
        await player.close()
        for worker in (prefill, decode):
            assert "still held" not in worker.log.read_text()


async def refusal_while_draining(player: Player) -> Exception:
    """Of a new reservation, once the signal has been seen (`Loads` says so)."""
    async for load in player.decode_worker.Loads(pb.LoadsRequest(interval_ms=20)):
        if load.state == "draining":
            break
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await player.decode.Reserve(player.reserve_request(new_journey(), [5], sampling(2)), timeout=CALL_TIMEOUT_S)
    return typed_error(caught.value)


def check_identity(info: pb.WorkerInfo, pid: int, role: str) -> None:
    assert (info.pid, info.role, info.worker_id) == (pid, role, f"{role}-0")
    assert info.fingerprint
    assert info.ops_backend
    assert info.bytes_per_token == 5_760
    assert info.num_blocks_total == 8 * MIB // (16 * 5_760)
    assert (info.max_speculate, info.dtype, info.max_context_length) == (8, "bf16", 4_096)
    assert info.weights_bytes > 20 * MIB
    assert 8 * MIB <= info.arena_bytes <= 9 * MIB
    lived_s = time.time() - psutil.Process(pid).create_time() + 1  # the kernel counts a start in ticks
    assert 0 < info.load_seconds < lived_s
    assert info.load_cpu_seconds > 0
    assert list(info.transports)


def check_memory(load: pb.LoadsReply) -> None:
    own_mib = (load.rss_bytes - 24 * MIB - 8 * MIB) / MIB
    assert 50 < own_mib <= MAX_OWN_MIB


async def test_a_worker_whose_parent_goes_away_ends(tmp_path: Path) -> None:
    async with worker_processes(SETTINGS, tmp_path, decode=0) as ([prefill], []):
        assert prefill.process.stdin is not None
        prefill.process.stdin.close()
        assert await asyncio.wait_for(prefill.process.wait(), CALL_TIMEOUT_S) == 0


def run_entry(*arguments: str, secret: str | None = SECRET) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PD_RELAY_SECRET"}
    if secret is not None:
        environment["PD_RELAY_SECRET"] = secret
    return subprocess.run(
        [sys.executable, "-m", "decode_worker", "--worker-id", "d", *arguments], capture_output=True, text=True,
        timeout=60, env=environment, cwd=ROOT, check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "secret", "says"),
    [
        (["--settings-json", '{"model": "/no/such/model"}'], SECRET, "no model"),
        (["--settings-json", '{"engine": {"cache_mb": 1}}'], SECRET, "cache_mib"),
        (["--settings-json", "[]"], SECRET, "one object"),
        (["--settings-json", "{"], SECRET, "no JSON"),
        ([], None, "PD_RELAY_SECRET"),
        ([], "short", "secret"),
    ],
)
def test_wrong_input_exits_2_and_says_what_was_wrong(arguments: list[str], secret: str | None, says: str) -> None:
    done = run_entry(*arguments, secret=secret)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_workers_import_nothing_heavy() -> None:
    code = (
        "import sys, json, prefill_worker.worker, decode_worker.worker, pd_engine.service.entry\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(json.loads(done.stdout))
    assert "torch" in loaded
    assert not loaded & {"ray", "transformers", "fastapi", "pandas", "scipy", "sympy", "pd_ops", "pd_router"}


class Pair:
    """Both workers in this process, to break them from the inside."""

    def __init__(self, steps: Steps = THE_MODEL) -> None:
        settings: Settings = load_settings(None, dict(SETTINGS))
        around = ProcessSurroundings(settings, secret=SECRET, host="127.0.0.1", steps=steps)
        self.prefill = PrefillWorker(settings, worker_id="p", host="127.0.0.1", secret=SECRET, surroundings=around)
        self.decode = DecodeWorker(settings, worker_id="d", host="127.0.0.1", secret=SECRET, surroundings=around)

    async def __aenter__(self) -> Pair:
        prefill, decode = await self.prefill.start(), await self.decode.start()
        self.player = Player(prefill.address, decode.address, SECRET)
        await self.player.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.player.close()
        await self.decode.stop()
        await self.prefill.stop()


async def test_a_decode_step_that_fails_fails_its_choices_only() -> None:
    broken = [True]

    def step(*arguments: Any) -> Any:
        if broken.pop() if broken else False:
            raise ZeroDivisionError("planted")
        return THE_MODEL.decode(*arguments)

    async with Pair(Steps(decode=step)) as pair:
        copy = await pair.player.run([5, 6, 7], sampling(4))
        assert copy.failure is not None
        assert (copy.failure.code, copy.failure.retryable) == ("internal", False)
        assert "planted" not in copy.failure.message
        await pair.player.until_idle()
        assert len((await pair.player.run([5, 6, 7], sampling(4))).token_ids) == 4
        await pair.player.until_idle()


async def test_a_prefill_step_that_fails_fails_its_prompts_only() -> None:
    broken = [True]

    def step(*arguments: Any) -> Any:
        if broken.pop() if broken else False:
            raise ZeroDivisionError("planted")
        return THE_MODEL.prefill(*arguments)

    async with Pair(Steps(prefill=step)) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.player.run([5, 6, 7], sampling(4), journey_id="a" * 32)
        assert isinstance(typed_error(caught.value), Internal)
        await pair.player.release("a" * 32)
        await pair.player.until_idle()
        assert len((await pair.player.run([5, 6, 7], sampling(4))).token_ids) == 4
        await pair.player.until_idle()


async def test_a_broken_compute_thread_is_told_to_everybody() -> None:
    def crash() -> None:
        raise ZeroDivisionError("planted")

    async with Pair() as pair:
        journey_id = new_journey()
        running = asyncio.create_task(pair.player.run([5, 6, 7], sampling(1_200), journey_id=journey_id))
        await pair.player.until(journey_id, lambda copy: len(copy.tokens) > 1)
        pair.decode._compute.post(crash)
        await asyncio.wait_for(pair.decode.wait_crashed(), CALL_TIMEOUT_S)
        copy = await running
        assert copy.failure is not None
        assert (copy.failure.code, copy.failure.retryable) == ("unavailable", True)
        assert pair.decode._unhealthy is not None
        await pair.decode._unhealthy
        assert await health(pair.player.decode_channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(pair.player.prefill_channel) == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_that_cannot_start_stops_cleanly() -> None:
    settings = load_settings(None, {"engine": {"cache_mib": 8}})
    async with Pair() as pair:
        port = int(pair.player.prefill_address.rpartition(":")[2])
        second = PrefillWorker(settings, worker_id="p2", host="127.0.0.1", secret=SECRET, port=port)
        with pytest.raises(InvalidArgument, match="cannot listen"):
            await second.start()
        await second.stop()
    wrong = DecodeWorker(
        load_settings(None, {"model": "/no/such/model"}), worker_id="d2", host="127.0.0.1", secret=SECRET
    )
    with pytest.raises(Exception, match="no model"):
        await wrong.start()
    await wrong.stop()


async def test_an_idle_stream_stays_and_ends_when_another_takes_over() -> None:
    async with Pair() as pair:
        request = pb.TokensRequest(router_id="twice")
        first = pair.player.decode_worker.Tokens(request)
        await first.read()
        second = pair.player.decode_worker.Tokens(request)
        await second.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first.read()
        assert typed_error(caught.value).code.value == "gone"
        second.cancel()
        assert Copy().token_ids == []
