"""A cluster that is changed and broken while it serves: pools scaled, a worker drained under readers, drills.

The cluster is shared by the tests of this module; its end, with no process left, is checked when they are done.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pd_engine.contracts import api_pb2
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import Completion, RouterClient, router_client
from pd_ops.cluster.control_client import ask_controller
from pd_ops.cluster.control_messages import DrainRequest, ScaleRequest, StatusRequest
from pd_ops.request_options import TokensPrompt, to_request
from pd_ops.verification.outcome import answer_difference, outcome_of
from support.commands import Serving, run_command

pytestmark = pytest.mark.cluster

NAME = "drilled"
REAPED_S = 20.0  # until whoever inherits an ended process has asked for its status
DRAIN_S = 120.0
NUM_PROMPT_TOKENS = 3_000
# A stopped process is to count as alive, and to keep its leases, for as long as a busy host may take.
SETTINGS = """
router: {worker_silence_ms: 120000}
transfer: {lease_ms: 120000, fetch_timeout_ms: 120000}
cluster: {hang_timeout_s: 120.0}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The ready event of a cluster of one prefill and two decode workers."""
    directory = tmp_path_factory.mktemp("state")
    config = directory / "drilled.yaml"
    config.write_text(SETTINGS, encoding="utf-8")
    serving = Serving(
        "--cluster", NAME, "--grpc-port", "0", "--http-port", "0", "--decode", "2", "--drillable",
        "--config", str(config), state_directory=directory, log=directory / "serve.log",
    )
    try:
        ready = serving.event()
        assert ready["event"] == "ready", serving.stderr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PD_RELAY_STATE_DIR", str(directory))
            yield ready
            processes = psutil.Process(ready["pid"]).children(recursive=True)
            stopped = run_command("stop", "--cluster", NAME, "--json")
        assert (stopped.code, stopped.document["killed_pids"], stopped.document["forced"]) == (0, [], False)
        assert psutil.wait_procs(processes, timeout=REAPED_S)[1] == []
    finally:
        serving.close()


async def ask(client: RouterClient, first_token: int, max_tokens: int, **pair: str) -> Completion:
    """A long prompt of its own for each `first_token`, on those workers, cold."""
    prompt = TokensPrompt(token_ids=(first_token, *(5 + number % 90 for number in range(NUM_PROMPT_TOKENS - 1))))
    sampling = SamplingFields(temperature=0.8, seed=3, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    placement = api_pb2.Placement(bypass_prefix_cache=True, **pair)
    return await client.complete(to_request(prompt, sampling, placement=placement))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for what has to be asked for; the test's timeout ends it otherwise."""
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def is_read_from(client: RouterClient, worker_id: str, request: asyncio.Task[Any]) -> bool:
    return request.done() or await num_pins(client, worker_id) > 0


async def is_draining(client: RouterClient, worker_id: str) -> bool:
    """As the controller and the router see it."""
    states = {worker.id: worker.state for worker in (await client.server_info()).workers}
    return (await process(NAME, worker_id))["state"] == states[worker_id] == "draining"


async def num_pins(client: RouterClient, worker_id: str) -> int:
    return {load.worker_id: load.num_pins for load in await client.loads()}[worker_id]


@asynccontextmanager
async def reader_stopped(client: RouterClient, pid: int) -> AsyncIterator[tuple[int, asyncio.Task[Completion]]]:
    """(first token, request) from prefill-1 to decode-0, whose process `pid` is stopped while it fetches."""
    for first_token in range(5, 4_000):
        request = asyncio.create_task(
            ask(client, first_token, 8, prefill_worker="prefill-1", decode_worker="decode-0")
        )
        await until(partial(is_read_from, client, "prefill-1", request))
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.5)  # a report that was under way
            if await num_pins(client, "prefill-1") > 0:  # or it had all by then: try again
                yield first_token, request
                return
        finally:
            os.kill(pid, signal.SIGCONT)
        await request


async def settled(client: RouterClient) -> None:
    """Until nothing is held anywhere."""
    async def is_settled() -> bool:
        info = await client.server_info()
        held = sum(worker.num_blocks_total - worker.num_blocks_free for worker in info.workers)
        return info.active_requests == held == 0 and not any(load.num_pins for load in await client.loads())

    await until(is_settled)


async def test_scale_and_drain_with_readers_under_a_stream(cluster: dict[str, Any]) -> None:
    """`drain-with-readers`, through all processes: the worker serves its pinned blocks to the end, and then ends."""
    decode_pid = next(worker["pid"] for worker in cluster["workers"] if worker["id"] == "decode-0")
    async with router_client(cluster["grpc_address"]) as client:
        long = asyncio.create_task(
            ask(client, 4_000, 900, prefill_worker="prefill-0", decode_worker="decode-1")
        )
        scaled = await ask_controller(NAME, ScaleRequest(prefill=2, drain_s=DRAIN_S))
        assert (scaled["added"], scaled["pools"]) == (["prefill-1"], {"prefill": 2, "decode": 2})
        async with reader_stopped(client, decode_pid) as (first_token, request):
            draining = asyncio.create_task(ask_controller(NAME, DrainRequest(worker="prefill-1", drain_s=DRAIN_S)))
            await until(lambda: is_draining(client, "prefill-1"))
            leaving = await process(NAME, "prefill-1")
            assert await num_pins(client, "prefill-1") > 0
            assert psutil.pid_exists(leaving["pid"])
            assert not draining.done()
        got = await request
        assert (await draining)["drained"]
        assert await process(NAME, "prefill-1") is None
        await until(partial(is_gone, leaving["pid"]))  # Ray knows that it has ended a little earlier
        again = await ask(client, first_token, 8, prefill_worker="prefill-0", decode_worker="decode-0")
        assert got.complete.handoff.prefill_worker == "prefill-1"
        assert answer_difference(outcome_of(again.complete), outcome_of(got.complete)) is None
        assert len((await long).complete.output_ids) == 900
        await settled(client)


async def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


async def process(cluster: str, worker_id: str) -> Any:
    status = await ask_controller(cluster, StatusRequest())
    return next((worker for worker in status["workers"] if worker["id"] == worker_id), None)


def test_a_drill(cluster: dict[str, Any], tmp_path: Path) -> None:
    unconfirmed = run_command("drill", "kill-decode", "--cluster", NAME, "--json")
    assert (unconfirmed.code, unconfirmed.document["error"]["code"]) == (2, "invalid_argument")
    finished = run_command(
        "drill", "kill-decode", "--cluster", NAME, "--yes", "--clients", "2", "--distinct", "3", "--report", tmp_path,
        "--json", timeout_s=280.0,
    )
    assert finished.code == 0, finished.stdout + finished.stderr
    [drill] = finished.document["drills"]
    assert drill["targets"][0].startswith("decode-")
    assert (drill["num_lost"], drill["num_wrong"], drill["num_leaked_blocks"]) == (0, 0, 0)
    assert drill["num_requests"] >= 6
    assert drill["detection_s"] is not None
    assert drill["gap_p99_ms"] >= drill["gap_p50_ms"] > 0
    assert "| kill-decode | passed |" in (tmp_path / "drills.md").read_text(encoding="utf-8")
    assert (tmp_path / "drills.json").exists()
    status = run_command("status", "--cluster", NAME, "--json").document
    restarts = {worker["id"]: worker["restarts"] for worker in status["processes"]["workers"]}
    assert restarts == {"prefill-0": 0, "decode-0": 0, "decode-1": 0, drill["targets"][0]: 1}
    assert "restarts: 1 (its process ended)" in run_command("status", "--cluster", NAME).stdout


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_all_drills_and_every_command(tmp_path: Path) -> None:
    """On a cluster with small caches, whose silent workers are lost soon."""
    config = tmp_path / "settings.yaml"
    config.write_text("engine: {cache_mib: 24}\n", encoding="utf-8")
    serving = Serving(
        "--cluster", "all-drills", "--grpc-port", "0", "--http-port", "0", "--decode", "2", "--drillable",
        "--config", str(config), state_directory=tmp_path, log=tmp_path / "serve.log",
    )
    directory = {"PD_RELAY_STATE_DIR": str(tmp_path)}
    try:
        assert serving.event()["event"] == "ready", serving.stderr()
        scaled = run_command("scale", "prefill=3", "--cluster", "all-drills", "--json", **directory)
        assert scaled.document["pools"] == {"prefill": 3, "decode": 2}
        moved = run_command("role", "prefill-2", "decode", "--cluster", "all-drills", "--json", **directory)
        assert (moved.document["replaced_by"], moved.document["pools"]) == ("decode-2", {"prefill": 2, "decode": 3})
        drained = run_command("drain", "decode-1", "--cluster", "all-drills", "--json", **directory)
        assert drained.document == {"worker": "decode-1", "drained": True, "pools": {"prefill": 2, "decode": 2}}
        finished = run_command(
            "drill", "all", "--cluster", "all-drills", "--yes", "--distinct", "4", "--json", timeout_s=1_000.0,
            **directory,
        )
        assert finished.code == 0, finished.stdout + finished.stderr
        assert all(drill["passed"] for drill in finished.document["drills"])
        stopped = run_command("stop", "--cluster", "all-drills", "--json", **directory)
        assert (stopped.code, stopped.document["killed_pids"]) == (0, [])
    finally:
        serving.close()
