"""What `serve` looks at before it starts anything."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from pd_engine.errors import FailedPrecondition, InvalidArgument, Unavailable
from pd_engine.settings import ClusterSettings, EngineSettings, RouterSettings
from pd_kernels.build import identity, library_path, seal
from pd_kernels.cpu.native import LIBRARY_DIRECTORY_VARIABLE
from pd_ops.cluster import preflight, processes, ray_runtime
from pd_ops.cluster.gpus import VISIBLE, gpu_of, visible_gpus
from pd_ops.cluster.processes import guarded
from pd_ops.cluster.state_file import read_state
from support.commands import run_command


def test_ports_that_are_the_same() -> None:
    with pytest.raises(InvalidArgument, match="both doors have port 7000"):
        preflight.check_ports(RouterSettings(grpc_port=7000, http_port=7000))
    preflight.check_ports(RouterSettings(grpc_port=0, http_port=0))


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgument, match=rf"cannot listen on 127.0.0.1:{port}.*--http-port"):
            preflight.check_ports(RouterSettings(grpc_port=0, http_port=port))


def test_a_port_that_somebody_lets_go_of() -> None:
    """As what ran in a cluster that was killed does, an instant later."""
    taken = socket.create_server(("127.0.0.1", 0))
    settings = RouterSettings(grpc_port=0, http_port=taken.getsockname()[1])
    ending = threading.Timer(0.2, taken.close)
    ending.start()
    preflight.check_ports(settings, wait_s=60.0)
    ending.join()


def test_compiled_ops_of_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_DIRECTORY_VARIABLE, str(tmp_path))
    library = library_path(tmp_path, "avx2")
    library.parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(FailedPrecondition, match=r"cannot be read: No such file.*--ops reference does without"):
        preflight.check_ops("auto", ["avx2"])
    library.write_bytes(b"of others")
    seal(library)
    with pytest.raises(FailedPrecondition, match=r"built from other sources; `python -m pd_kernels.build`"):
        preflight.check_ops("cpu", ["avx2"])
    preflight.check_ops("reference", ["avx2"])
    preflight.check_ops("auto", [])
    library.write_bytes(f"\0pd-sources-{identity('avx2')}\0".encode())
    with pytest.raises(FailedPrecondition, match=r"damaged or were built by another version; `python -m pd_kernels"):
        preflight.check_ops("auto", ["avx2"])
    seal(library)
    preflight.check_ops("auto", ["avx2"])


@pytest.mark.parametrize("name", ["../x", "", "A", "a/b", "-a", "a\n", "a" * 33, "é"])
def test_names_that_no_cluster_can_have(name: str) -> None:
    with pytest.raises(InvalidArgument, match="a cluster's name has"):
        read_state(name)


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_name_is_no_path(command: str, tmp_path: Path) -> None:
    finished = run_command(command, "--cluster", "../x", "--json", PD_RELAY_STATE_DIR=str(tmp_path / "state"))
    assert finished.code == 2
    assert finished.document["error"]["code"] == "invalid_argument"
    assert not (tmp_path / "state").exists()


class SlowRay:
    @staticmethod
    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.\nA traceback of many lines")


def test_a_ray_that_does_not_start() -> None:
    """Of a start that takes too long Ray raises a plain Exception."""
    with guarded() as guard, pytest.raises(Unavailable) as caught:
        ray_runtime._init(SlowRay, ClusterSettings(), 3, guard)
    assert "timed out during startup.;" in caught.value.message
    assert "\n" not in caught.value.message


def test_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: "/nowhere")
    expected = r"cannot make a directory in /nowhere: No such file.*TMPDIR"
    with pytest.raises(FailedPrecondition, match=expected), guarded():
        raise AssertionError("entered")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guardian_that_is_gone_or_stopped(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GUARDIAN_TIMEOUT_S", 0.1)
    with guarded() as guard:
        os.kill(guard.guardian_pid, number)
    assert not guard.directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(guard.guardian_pid, 0)


@pytest.mark.parametrize(("engine", "problem", "error", "message"), [
    ({"ops": "cpu"}, None, InvalidArgument, "engine.ops: cpu computes on the CPU"),
    ({}, "it has none", FailedPrecondition, "engine.device: cuda: it has none"),
])
def test_a_gpu_that_is_asked_for(
    engine: dict[str, str], problem: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        preflight.check_device(EngineSettings(device="cuda", **engine), lambda: problem)  # type: ignore[arg-type]
    preflight.check_device(EngineSettings(device="cuda", ops="triton"), lambda: None)
    preflight.check_device(EngineSettings(), lambda: "nobody asks")


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU")
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_without_a_gpu_it_is_refused_at_once(command: str, tmp_path: Path) -> None:
    question = ("--prompt", "x") if command == "generate" else ()
    finished = run_command(
        command, "--device", "cuda", "--json", *question, PD_RELAY_STATE_DIR=str(tmp_path / "state"))
    assert finished.code == 2
    assert "engine.device: cuda: " in finished.stderr
    assert "Traceback" not in finished.stderr


def test_workers_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workers = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [gpu_of(worker, ["0", "1", "2", "3"], 2) for worker in workers] == ["0", "1", "2", "3", "0"]
    assert {gpu_of(worker, ["GPU-8f"], 2) for worker in workers} == {"GPU-8f"}
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv(VISIBLE, raising=False)
    assert visible_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv(VISIBLE, "3, GPU-8f")
    assert visible_gpus(tmp_path) == ["3", "GPU-8f"]
