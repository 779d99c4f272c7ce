"""However `pd-relay serve` ends, no process of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.commands import COMMAND, Serving, environment, run_command

pytestmark = pytest.mark.cluster

GONE_S = 60.0
Start = Callable[..., Serving]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Serving] = []

    def begin(*arguments: str) -> Serving:
        serving = Serving(
            "--cluster", "ends", "--grpc-port", "0", "--http-port", "0", *arguments,
            state_directory=tmp_path / "state", log=tmp_path / "serve.log",
        )
        started.append(serving)
        return serving

    yield begin
    for serving in started:
        serving.close()


def wait_until_ray_runs(serving: Serving) -> list[psutil.Process]:
    """Processes below it, once Ray's raylet is one of them; the test's timeout ends the wait otherwise."""
    while True:
        assert serving.process.poll() is None, serving.stderr()
        processes = psutil.Process(serving.process.pid).children(recursive=True)
        if "raylet" in {process.name() for process in processes if process.is_running()}:
            return processes


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert alive == []


def test_killed_workers_that_are_not_restarted_and_a_killed_serve(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("router: {recovery_wait_ms: 10000000}\ncluster: {restart: false}\n", encoding="utf-8")
    serving = start("--config", str(config))
    ready = serving.event()
    assert ready["event"] == "ready"
    processes = psutil.Process(ready["pid"]).children(recursive=True)
    pids = {worker["id"]: worker["pid"] for worker in ready["workers"]}
    streaming = subprocess.Popen(
        [*COMMAND, "submit", "--cluster", "ends", "--prompt", "a", "--ignore-eos", "--json", "--stream"], text=True,
        env=environment(PD_RELAY_STATE_DIR=str(tmp_path / "state")), stdout=subprocess.PIPE,
    )
    assert streaming.stdout is not None
    assert json.loads(streaming.stdout.readline())["event"] == "tokens"
    os.kill(pids["decode-0"], signal.SIGKILL)
    assert serving.event() == {"event": "lost", "id": "decode-0", "restarts": False}
    output, _ = streaming.communicate()  # at once: nobody waits for a worker that none replaces
    assert streaming.returncode == 3
    assert "no worker is left" in json.loads(output.splitlines()[-1])["error"]["message"]
    submit = run_command(
        "submit", "--cluster", "ends", "--prompt", "a", "--json", PD_RELAY_STATE_DIR=str(tmp_path / "state")
    )
    assert submit.code == 3
    assert submit.document["error"]["code"] == "unavailable"

    serving.process.kill()
    assert_gone(processes)
    again = run_command("status", "--cluster", "ends", "--json", PD_RELAY_STATE_DIR=str(tmp_path / "state"))
    assert again.code == 2


def test_ctrl_c_while_it_starts(start: Start) -> None:
    serving = start()
    processes = wait_until_ray_runs(serving)
    serving.signal_group(signal.SIGINT)
    events = serving.rest()
    assert serving.process.returncode == 130, serving.stderr()
    assert events == [{"interrupted": True}]
    assert "Traceback" not in serving.stderr()
    assert "killed" not in serving.stderr()
    assert_gone(processes)


@pytest.mark.slow
def test_a_dead_router_that_is_not_restarted_ends_the_cluster(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("cluster: {restart: false}\n", encoding="utf-8")
    serving = start("--config", str(config))
    ready = serving.event()
    processes = psutil.Process(ready["pid"]).children(recursive=True)
    os.kill(ready["router_pid"], signal.SIGKILL)
    events = serving.rest()
    assert events[0] == {"event": "lost", "id": "router", "restarts": False}
    assert events[-1]["error"]["code"] == "unavailable"
    assert serving.process.returncode == 3
    assert_gone(processes)


def test_a_worker_that_cannot_start_says_why_at_once(start: Start, tmp_path: Path) -> None:
    """The checkpoint is fine, but one of its numbers is not: only loading it tells."""
    config = tmp_path / "settings.yaml"
    config.write_text("engine: {cache_mib: 1, block_size: 1024}\n", encoding="utf-8")
    serving = start("--config", str(config))
    processes = wait_until_ray_runs(serving)
    [event] = serving.rest()
    assert serving.process.returncode == 2, serving.stderr()
    assert "engine.cache_mib" in event["error"]["message"]
    assert_gone(processes)
