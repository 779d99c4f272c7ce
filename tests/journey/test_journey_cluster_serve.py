"""A cluster as a user has it: `pd-relay serve` with one worker a pool, and the commands that talk to it.

Every process is real and started through Ray. The cluster is shared by the tests of this module; its end, with no
process left, is checked when they are done.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pd_ops.cluster.ray_runtime import OWN_ENVIRONMENT
from support.commands import COMMAND, Finished, Serving, environment, run_command

pytestmark = pytest.mark.cluster

NAME = "served"
REAPED_S = 20.0  # until whoever inherits an ended process has asked for its status
MAX_WORKER_BYTES = 360_000_000   # beyond weights and the arena's resident pages; torch and Ray alone take 270 of it
MAX_ROUTER_BYTES = 200_000_000
MAX_CLUSTER_BYTES = 2_500_000_000
WORKER_KEYS = {
    "id", "role", "pid", "host", "address", "epoch", "state", "num_blocks_total", "num_blocks_free", "num_running",
    "num_waiting", "rss_bytes", "weights_bytes", "arena_bytes", "ops_backend", "load_seconds", "load_cpu_seconds",
    "num_preempted", "host_cache_bytes", "num_moves_total", "num_recomputed_total",
}
TOKENS = (
    "--token-ids", "0,17,300,4000", "--max-tokens", "12", "--seed", "5", "--temperature", "0.7", "--logprobs", "2",
    "--ignore-eos", "--json",
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    ready: dict[str, Any]
    state_directory: Path

    def run(self, command: str, *arguments: str | bytes, cluster: str | None = NAME) -> Finished:
        named = ("--cluster", cluster) if cluster else ()
        return run_command(command, *named, *arguments, PD_RELAY_STATE_DIR=str(self.state_directory))

    def status(self) -> dict[str, Any]:
        return self.run("status", "--json").document

    def submit(self, *arguments: str) -> Submitted:
        """A request that streams, of which the first token has come."""
        return Submitted(subprocess.Popen(
            [*COMMAND, "submit", "--cluster", NAME, "--json", "--stream", *arguments], text=True,
            env=environment(PD_RELAY_STATE_DIR=str(self.state_directory)), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ))


class Submitted:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "tokens"

    def finish(self) -> dict[str, Any]:
        """The last event."""
        stdout, stderr = self.process.communicate()
        assert self.process.returncode == 0, stderr
        last: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return last


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("state")
    config = directory / "served.yaml"
    config.write_text("decode: {adaptive_speculation: false}\n")  # drafts are counted
    serving = Serving(
        "--model", "demo", "--cluster", NAME, "--grpc-port", "0", "--http-port", "0", "--config", str(config),
        state_directory=directory, log=directory / "serve.log",
    )
    try:
        ready = serving.event()
        assert ready["event"] == "ready", serving.stderr()
        processes = psutil.Process(ready["pid"]).children(recursive=True)
        assert len(processes) > 3
        cluster = Cluster(ready=ready, state_directory=directory)
        yield cluster
        running = cluster.submit("--max-tokens", "16", "--ignore-eos", "--token-ids", "0,5")
        stopped = cluster.run("stop", "--json").document
        assert running.finish()["finish_reason"] == "length"
        assert stopped == {
            "cluster": NAME, "pid": ready["pid"], "stopped": True, "forced": False, "killed_pids": [],
        }
        assert serving.rest() == [{"event": "stopped", "cluster": NAME}]
        assert serving.process.returncode == 0
        assert psutil.wait_procs(processes, timeout=REAPED_S)[1] == []
    finally:
        serving.close()


def test_nothing_listens_beyond_this_host(cluster: Cluster) -> None:
    serving = psutil.Process(cluster.ready["pid"])
    listening = {
        connection.laddr.ip
        for process in [serving, *serving.children(recursive=True)]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}, listening
    assert listening


def test_ray_runs_no_process_that_does_nothing_here(cluster: Cluster) -> None:
    """One that names the methods otherwise that start them would start them all again."""
    running = [" ".join(one.cmdline()) for one in psutil.Process(cluster.ready["pid"]).children(recursive=True)]
    assert any("gcs_server" in command for command in running), running
    for script in ("monitor.py", "log_monitor.py", "dashboard.py"):
        assert not [command for command in running if script in command]


def test_a_completion_is_what_one_process_gives(cluster: Cluster) -> None:
    remote, alone = cluster.run("submit", *TOKENS), run_command("generate", *TOKENS)
    assert (remote.code, alone.code) == (0, 0), remote.stderr + alone.stderr
    document = remote.document
    handoff = document["handoff"]
    assert {**document, "handoff": None} == alone.document
    assert (handoff["prefill_worker"], handoff["decode_worker"]) == ("prefill-0", "decode-0")
    assert (handoff["bytes"], handoff["transport"]) == (4 * 5 * 576 * 2, "shared_memory")


def test_several_choices_are_what_one_process_gives(cluster: Cluster) -> None:
    remote, alone = cluster.run("submit", "-n", "3", *TOKENS), run_command("generate", "--n", "3", *TOKENS)
    assert (remote.code, alone.code) == (0, 0), remote.stderr + alone.stderr
    choices = alone.document["choices"]
    for choice, expected in zip(remote.document["choices"], choices, strict=True):
        for key in ("choice", "token_ids", "text", "logprobs", "seed", "finish_reason", "stop_reason"):
            assert choice[key] == expected[key]
    assert [choice["choice"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    steps = cluster.run("submit", "-n", "3", *TOKENS, "--stream").events
    for number, choice in enumerate(choices):
        own = [event for event in steps if event["choice"] == number and event["event"] == "tokens"]
        assert [token for event in own for token in event["token_ids"]] == choice["token_ids"]
    people = cluster.run("submit", "-n", "3", *TOKENS[:-1])
    assert sorted(people.stdout) == sorted("".join(choice["text"] + "\n" for choice in choices))


def test_a_stream_says_the_same(cluster: Cluster) -> None:
    *steps, complete = cluster.run("submit", *TOKENS, "--stream").events
    assert complete.pop("event") == "complete"
    assert [token for event in steps for token in event["token_ids"]] == complete["token_ids"]
    assert [one for event in steps for one in event["logprobs"]] == complete["logprobs"]
    assert "".join(event["text"] for event in steps) == complete["text"]
    people = cluster.run("submit", *TOKENS[:-1])
    assert people.stdout == complete["text"] + "\n"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--token-ids", "999999"], "token ids must be in [0, 4096)"),
    (["--token-ids", ",".join(["1"] * 8192)], "at most"),
    (["--prompt", "a", "--max-tokens", "100000"], "max_tokens must be at most"),
    (["--prompt", "a", "--temperature", "nan"], "temperature must be"),
])
def test_bad_input_is_refused(cluster: Cluster, arguments: list[str], message: str) -> None:
    finished = cluster.run("submit", "--json", *arguments)
    assert finished.code == 2
    assert message in finished.document["error"]["message"]
    assert len(finished.stderr.splitlines()) == 1


def test_status(cluster: Cluster) -> None:
    document = cluster.status()
    workers = {worker["id"]: worker for worker in document["workers"]}
    assert set(workers) == {"prefill-0", "decode-0"}
    for worker in workers.values():
        assert set(worker) == WORKER_KEYS
        assert worker["state"] == "ready"
        assert worker["num_blocks_total"] >= worker["num_blocks_free"] > 0
    told = {worker["id"]: worker for worker in cluster.ready["workers"]}
    for name in ("pid", "epoch", "address", "role"):
        assert {key: worker[name] for key, worker in workers.items()} == {key: one[name] for key, one in told.items()}
    assert document["cluster"] == NAME
    processes = document["processes"]
    assert {worker["id"]: worker["state"] for worker in processes["workers"]} == dict.fromkeys(workers, "serving")
    assert processes["router"]["pid"] == document["router_pid"] == cluster.ready["router_pid"]
    assert processes["operation"] is None
    by_port = cluster.run("status", "--json", "--grpc-port", cluster.ready["grpc_address"].split(":")[1], cluster=None)
    assert by_port.document["processes"] is None
    assert by_port.document["memory"]["total_rss_bytes"] is None
    assert "prefill-0" in cluster.run("status").stdout


def test_no_process_has_what_it_must_not(cluster: Cluster) -> None:
    """Asked through Ray, as anybody can who may connect to it."""
    script = (
        "import json, ray, sys\n"
        f"ray.init(address=sys.argv[1], namespace='pd-relay-{NAME}', log_to_driver=False, logging_level='error')\n"
        "actors = {name: ray.get_actor(name) for name in ('router', 'prefill-0', 'decode-0')}\n"
        "modules = {name: ray.get(actor.imported_modules.remote()) for name, actor in actors.items()}\n"
        "print(json.dumps(modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, cluster.ready["ray_address"]], capture_output=True, text=True, check=True,
        # As Ray asks of whoever joins a cluster that has a token, and that listens on the loopback address.
        env=environment(RAY_AUTH_MODE="token", **OWN_ENVIRONMENT),
    )
    modules = json.loads(done.stderr.splitlines()[-1])
    assert "torch" in modules["prefill-0"]
    assert "torch" in modules["decode-0"]
    assert "torch" not in modules["router"]
    assert not any("transformers" in names for names in modules.values())
    assert "libtorch" not in Path(f"/proc/{cluster.ready['router_pid']}/maps").read_text(encoding="utf-8")
    assert "libtorch" in Path(f"/proc/{cluster.ready['workers'][0]['pid']}/maps").read_text(encoding="utf-8")


def test_serving_has_the_priority_of_the_command(cluster: Cluster) -> None:
    """Ray starts its processes for batch work: anything else on the host would starve them."""
    own = psutil.Process(cluster.ready["pid"]).nice()
    pids = [cluster.ready["router_pid"], *(worker["pid"] for worker in cluster.ready["workers"])]
    assert [psutil.Process(pid).nice() for pid in pids] == [own] * 3


def test_ctrl_c_aborts_a_request(cluster: Cluster) -> None:
    submitted = cluster.submit("--token-ids", "0,1,2", "--max-tokens", "2000", "--ignore-eos")
    submitted.process.send_signal(signal.SIGINT)
    _, stderr = submitted.process.communicate()
    assert submitted.process.returncode == 130
    assert "Traceback" not in stderr
    while True:  # until nothing is left of it; the test's timeout ends it otherwise
        status = cluster.status()
        if status["active_requests"] == 0 and all(
            worker["num_blocks_free"] == worker["num_blocks_total"] and worker["num_running"] == 0
            for worker in status["workers"]
        ):
            break


def test_a_name_and_a_port_are_taken_once(cluster: Cluster, tmp_path: Path) -> None:
    again = cluster.run("serve", "--grpc-port", "0", "--http-port", "0", "--json")
    assert again.code == 2
    assert f"a cluster named '{NAME}' runs on this host already" in again.document["error"]["message"]
    port = cluster.ready["grpc_address"].split(":")[1]
    taken = cluster.run("serve", "--grpc-port", port, "--json", cluster="another")
    assert taken.code == 2
    assert re.search(rf"cannot listen on 127.0.0.1:{port}: .*--grpc-port", taken.document["error"]["message"])


@pytest.mark.parametrize(("arguments", "message"), [
    (["drill", "burst", "--yes"], "is not marked as drillable"),
    (["drain", "decode-0"], "decode-0 is the last decode worker that serves"),
    (["drain", "decode-9"], "the cluster has no worker 'decode-9'; it has prefill-0, decode-0"),
    (["role", "prefill-0", "decode"], "prefill-0 is the last prefill worker that serves"),
    (["scale", "decode=0"], "a pool has 1 to 1024 workers"),
])
def test_what_would_harm_it_is_refused(cluster: Cluster, arguments: list[str], message: str) -> None:
    finished = cluster.run(*arguments, "--json")
    assert finished.code in (2, 3)
    assert message in finished.document["error"]["message"]


def test_verify(cluster: Cluster) -> None:
    """Cold and warm; the rest of it, on a cluster of its own, is in `test_journey_cluster_checks`."""
    finished = cluster.run(
        "verify", "--against", cluster.ready["grpc_address"], "--count", "6", "--resumed", "0", "--splits", "0",
        "--no-press", "--seed", "2", "--json", cluster=None,
    )
    assert finished.code == 0, finished.stderr
    document = finished.document
    assert (document["count"], document["identical"], document["different"]) == (9, 9, 0)
    cold = [case for case in document["cases"] if case["follows"] is None and case["handoff_bytes"] is not None]
    assert len(cold) >= 4
    expected = sum(case["prompt_tokens"] for case in cold) * document["bytes_per_token"]
    assert sum(case["handoff_bytes"] for case in cold) == expected > 0
    assert sum(case["cached_tokens"] for case in document["cases"]) == document["cached_tokens"] > 0


def test_verify_refuses_another_model(cluster: Cluster) -> None:
    finished = cluster.run(
        "verify", "--against", cluster.ready["grpc_address"], "--count", "1", "--dtype", "fp32", "--json", cluster=None
    )
    assert finished.code == 2
    assert "fingerprint" in finished.document["error"]["message"]


def test_memory_stays_small(cluster: Cluster) -> None:
    """Workers return every few seconds what requests needed for a while."""
    deadline_s = time.monotonic() + 30
    while max((beyond := workers_beyond(cluster)).values()) > MAX_WORKER_BYTES and time.monotonic() < deadline_s:
        time.sleep(1)
    assert max(beyond.values()) <= MAX_WORKER_BYTES, beyond
    memory = cluster.status()["memory"]
    assert memory["router_rss_bytes"] <= MAX_ROUTER_BYTES
    assert memory["total_rss_bytes"] <= MAX_CLUSTER_BYTES
    assert memory["total_rss_bytes"] > memory["workers_rss_bytes"] + memory["router_rss_bytes"] > 0


def workers_beyond(cluster: Cluster) -> dict[str, int]:
    """Resident bytes of each worker beyond weights and arenas."""
    return {
        worker["id"]: worker["rss_bytes"] - worker["weights_bytes"] - arena_resident_bytes(worker["pid"])
        for worker in cluster.status()["workers"]
    }


def arena_resident_bytes(pid: int) -> int:
    """Of its own arena, and of those that it reads from."""
    maps = psutil.Process(pid).memory_maps(grouped=True)
    return sum(one.rss for one in maps if "pd-relay-arena" in one.path)
