"""Autoscaling of a real cluster: its decode pool grows under load and shrinks after it, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pd_engine.settings import load_settings
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import router_client
from pd_ops.drills.traffic import Traffic
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.oracle import expected_outcome
from pd_ops.verification.outcome import answer_difference
from pd_ops.verification.remote import Request
from pd_ops.verification.run import load_oracle
from support.commands import COMMAND, Serving, environment, run_command

NAME = "autoscaled"
NUM_CLIENTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 400, 500
# Under these requests 40 % of one worker's blocks are in use, and the cache holds them all.
SETTINGS = """
engine: {cache_mib: 48}
autoscale: {prefill_most: 1, decode_most: 2, cache_share: 0.2, queue_ms: 1.0e+6, itl_ms: 1.0e+6, up_after_s: 0.5,
            down_after_s: 2.0, pause_s: 1.0, interval_s: 0.3}
"""
REQUESTS = [
    Request(
        prompt=TokensPrompt(token_ids=tuple(5 + (number * 7 + place) % 900 for place in range(PROMPT_TOKENS))),
        sampling=SamplingFields(
            temperature=0.8, seed=number, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0
        ),
    )
    for number in range(NUM_CLIENTS)
]


def pools(looks: list[dict[str, Any]]) -> list[int]:
    """The decode pool's sizes, as they were seen, each once."""
    sizes = [look["pools"]["decode"]["size"] for look in looks]
    return [size for number, size in enumerate(sizes) if number == 0 or size != sizes[number - 1]]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_pool_follows_the_load(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(SETTINGS, encoding="utf-8")
    directory = {"PD_RELAY_STATE_DIR": str(tmp_path)}
    serving = Serving(
        "--cluster", NAME, "--grpc-port", "0", "--http-port", "0", "--config", str(config), state_directory=tmp_path,
        log=tmp_path / "serve.log",
    )
    try:
        ready = await asyncio.to_thread(serving.event)
        assert ready["event"] == "ready", serving.stderr()
        scaler = await asyncio.create_subprocess_exec(
            *COMMAND, "autoscale", "--config", str(config), "--cluster", NAME, "--json", "--timeout", "120",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**directory),
        )
        looks: list[dict[str, Any]] = []
        traffic = Traffic(ready["grpc_address"], REQUESTS, num_clients=NUM_CLIENTS, give_up_s=600.0)
        asking = asyncio.create_task(traffic.run())
        try:
            await looked(scaler, looks, size=2)
            await traffic.wait_done(NUM_CLIENTS)  # with two workers
            traffic.stop()
            await asking
            await looked(scaler, looks, size=1)
            scaler.send_signal(signal.SIGINT)
            _, said = await scaler.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                scaler.kill()
            asking.cancel()
        assert pools(looks) == [1, 2, 1]
        assert "starting decode-1" in said.decode()
        assert "draining decode-1" in said.decode()
        assert [one.error for one in traffic.asked if one.error is not None] == []
        assert sum(one.num_refused + one.num_broken for one in traffic.asked) == 0
        async with router_client(ready["grpc_address"]) as client:
            model, info = await client.model_info(), await client.server_info()
        assert all(worker.num_blocks_free == worker.num_blocks_total for worker in info.workers)
        oracle = load_oracle(load_settings(config), model)
        expected = [expected_outcome(oracle, request) for request in REQUESTS]
        for asked in traffic.asked:
            assert asked.outcome is not None
            assert answer_difference(expected[asked.number], asked.outcome) is None
        stopped = await asyncio.to_thread(run_command, "stop", "--cluster", NAME, "--json", **directory)
        assert (stopped.code, stopped.document["killed_pids"]) == (0, [])
    finally:
        serving.close()


async def looked(scaler: asyncio.subprocess.Process, looks: list[dict[str, Any]], *, size: int) -> None:
    """Until it sees so many decode workers."""
    assert scaler.stdout is not None
    while not looks or looks[-1]["pools"]["decode"]["size"] != size:
        line = await scaler.stdout.readline()
        assert line, "autoscale has ended"
        looks.append(json.loads(line))
