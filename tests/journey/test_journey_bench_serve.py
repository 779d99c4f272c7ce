"""`pd-relay bench serve` against real workers, over gRPC; and what it leaves there: nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pd_engine.contracts import api_pb2
from pd_engine.settings import Settings
from pd_ops.bench.harness import served
from pd_ops.bench.serve.result import read_result
from pd_ops.client import router_client
from support.commands import run_command
from support.fork_server import start_fork_server
from support.leaks import assert_nothing_left

ARGUMENTS = (
    "bench", "serve", "--kind", "short", "--requests", "6", "--rate", "20", "--length-scale", "0.1",
    "--ttft-target-ms", "600000", "--itl-target-ms", "600000", "--seed", "3", "--prompt-salt", "s", "--json",
)


def is_idle(info: api_pb2.ServerInfo) -> bool:
    return not info.active_requests and all(one.num_blocks_free == one.num_blocks_total for one in info.workers)


async def test_a_short_run(tmp_path: Path) -> None:
    settings = Settings.model_validate({
        "router": {"grpc_port": 0, "http_port": 0, "local_prefill_tokens": 0}, "engine": {"cache_mib": 32},
    })
    out = tmp_path / "result"
    start_fork_server()
    async with assert_nothing_left(), served(settings, tmp_path) as address:
        finished = await asyncio.to_thread(run_command, *ARGUMENTS, "--address", address, "--out", out)
        assert finished.code == 0, finished.stderr
        async with router_client(address) as client:
            while not is_idle(await client.server_info()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    document = finished.document
    summary = document["summary"]
    assert (summary["requests"], summary["finished"], summary["good"]) == (6, 6, 6)
    assert summary["completion_tokens"] == document["load"]["output_tokens"]
    assert summary["handoff"]["count"] > 0
    assert summary["queue_ms"]["count"] == 6
    assert document["identity"]["topology"]["prefill"] == document["identity"]["topology"]["decode"] == 1
    assert document["identity"]["settings"]["engine"]["cache_mib"] == 32
    assert document["identity"]["fingerprint"]
    result = read_result(out)
    assert result.document == document
    assert len(result.records) == 6
