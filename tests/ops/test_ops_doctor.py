"""`pd-relay doctor`: each check on hosts that are good, poor and bad; and that broken ops are found."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.settings import Settings, load_settings
from pd_ops.doctor import rows
from pd_ops.doctor.check import Check, Result, can_serve, checks_text
from pd_ops.doctor.host import (
    clock_check,
    locked_memory_check,
    memory_check,
    open_files_check,
    ports_check,
    ray_memory_check,
    shared_memory_check,
)
from pd_ops.doctor.software import gpu_check, module_check, processor_check, rdma_check, versions_check
from support.commands import run_command
from support.engine_cases import available_ops, load_engine

GIB = 2**30
REQUIREMENTS = ("alpha>=2.0", "beta>=1; extra == 'gpu'", "gamma")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=5, layer_scale=0.15)
    return path


def settings(**overrides: Any) -> Settings:
    return load_settings(None, {name.replace("__", "."): value for name, value in overrides.items()})


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.slow] if name == "reference" and len(available_ops()) > 1 else [])
    for name in available_ops()
])
def engine(request: pytest.FixtureRequest, model: Path) -> Engine:
    return load_engine(model, ops=request.param, dtype="bf16")


def test_rows_do_not_depend_on_company(engine: Engine) -> None:
    assert rows.find_differences(engine) == []
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize(("op", "what"), [("rms_norm", "latents"), ("absorb_values", "last state")])
def test_an_op_whose_rows_look_at_their_number_is_found(
    model: Path, op: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit in the last place more, in every step of an even number of rows."""
    broken = load_engine(model, ops="reference", dtype="bf16")
    right = getattr(broken.ops, op)

    def wrong(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        result = right(x, *arguments)
        return torch.nextafter(result, torch.full_like(result, 1e9)) if x.shape[0] % 2 == 0 else result

    monkeypatch.setattr(broken.ops, op, wrong)
    differences = rows.find_differences(broken)
    assert differences
    assert what in " ".join(differences)
    assert broken.pool.num_free == broken.pool.num_blocks


def test_different_logprobs_of_the_same_tokens_are_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = load_engine(model, ops="reference", dtype="bf16")
    right = broken.ops.logprobs
    monkeypatch.setattr(broken.ops, "logprobs", lambda logits_TZ: right(logits_TZ) - logits_TZ.shape[0] * 2**-10)
    assert {part.rpartition(": ")[2] for part in rows.find_differences(broken)} == {"logprobs"}


def test_rows_check_says_what_it_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = rows.rows_check(model, settings().engine, "reference")
    assert check.result is Result.OK
    assert "bit for bit the same" in check.sentence
    monkeypatch.setattr(rows, "find_differences", lambda engine: ["prompt of 5: latents"])
    check = rows.rows_check(model, settings().engine, "reference")
    assert (check.result, "prompt of 5: latents" in check.sentence) == (Result.FAILED, True)


def test_ops_that_are_not_built_are_absent(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PD_KERNELS_LIBRARIES", str(tmp_path))
    check = rows.rows_check(model, settings().engine, "cpu")
    assert (check.result, "not built" in check.sentence) == (Result.ABSENT, True)


@pytest.mark.parametrize(("ops", "isas", "result", "words"), [
    ("auto", ["plain", "avx2"], Result.OK, "compiled ops for avx2"),
    ("auto", [], Result.WARNING, "the torch reference would run"),
    ("cpu", [], Result.FAILED, "no compiled ops"),
    ("reference", ["plain"], Result.WARNING, "several times slower"),
])
def test_which_ops_would_run(ops: str, isas: list[str], result: Result, words: str) -> None:
    check = processor_check(settings(engine__ops=ops), isas, cpu_problem=lambda isa: None)
    assert check.result is result
    assert words in check.sentence


def test_fp16_is_of_the_reference() -> None:
    for ops, result in (("auto", Result.WARNING), ("cpu", Result.FAILED)):
        check = processor_check(settings(engine__ops=ops, engine__dtype="fp16"), ["avx2"])
        assert check.result is result
        assert "which only the torch reference has" in check.sentence


def test_ops_that_are_damaged() -> None:
    """`serve` would refuse them; the reference does without."""
    check = processor_check(settings(), ["avx2"], cpu_problem=lambda isa: f"{isa} is damaged")
    assert (check.result, "avx2 is damaged" in check.sentence) == (Result.FAILED, True)
    assert processor_check(settings(engine__ops="reference"), ["avx2"]).result is Result.WARNING


def test_ops_of_a_gpu() -> None:
    wanted = settings(engine__device="cuda")
    assert processor_check(wanted, [], lambda: None).result is Result.OK
    check = processor_check(wanted, ["avx2"], lambda: "there is none")
    assert (check.result, check.sentence) == (Result.FAILED, "there is none")


@pytest.mark.parametrize(("found", "pins", "result", "words"), [
    ({"alpha": "2.1", "gamma": "1"}, "alpha==2.1\nGamma==1\n", Result.OK, "those that are tested"),
    ({"alpha": "2.1+cpu", "gamma": "1"}, "# why\nalpha==2.1\n", Result.OK, "those that are tested"),
    ({"alpha": "2.2", "gamma": "1"}, "alpha==2.1\n", Result.WARNING, "alpha 2.2 instead of 2.1"),
    ({"alpha": "1.9", "gamma": "1"}, "alpha==2.1\n", Result.FAILED, "alpha>=2.0 (found 1.9)"),
    ({"alpha": "2.1"}, "alpha==2.1\n", Result.FAILED, "gamma (found none)"),
    ({"alpha": "2.1", "gamma": "1"}, None, Result.OK, "in a checkout only"),
])
def test_versions(found: dict[str, str], pins: str | None, result: Result, words: str, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    if pins is not None:
        file.write_text(pins, encoding="utf-8")
    check = versions_check(file, REQUIREMENTS, found.get)
    assert check.result is result, check
    assert words in check.sentence


def test_versions_of_this_environment_are_met() -> None:
    assert versions_check().result is not Result.FAILED


def test_memory(model: Path) -> None:
    results = [memory_check(settings(), model, available).result for available in (16 * GIB, GIB, GIB // 8)]
    assert results == [Result.OK, Result.WARNING, Result.FAILED]


@pytest.mark.parametrize(("limits", "result"), [
    ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Result.OK), ((1024, 4096), Result.OK),
    ((512, 4096), Result.WARNING), ((64, 64), Result.FAILED),
])
def test_open_files(limits: tuple[int, int], result: Result) -> None:
    assert open_files_check(limits).result is result


@pytest.mark.parametrize(("has_rdma", "limit", "result"), [
    (False, 65_536, Result.OK), (True, 65_536, Result.WARNING), (True, resource.RLIM_INFINITY, Result.OK),
])
def test_locked_memory(has_rdma: bool, limit: int, result: Result) -> None:
    assert locked_memory_check(settings(), has_rdma=has_rdma, limit=limit).result is result


def test_shared_memory_works_here() -> None:
    assert shared_memory_check().result is Result.OK


def test_shared_memory_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    check = shared_memory_check()
    assert (check.result, "not permitted" in check.sentence) == (Result.FAILED, True)


def test_rays_memory(tmp_path: Path) -> None:
    assert ray_memory_check(settings(), tmp_path).result is Result.OK
    assert ray_memory_check(settings(cluster__object_store_mib=10**9), tmp_path).result is Result.WARNING
    assert ray_memory_check(settings(), tmp_path / "nothing").result is Result.WARNING


def test_ports() -> None:
    assert ports_check(settings(router__grpc_port=0, router__http_port=0)).result is Result.OK
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = ports_check(settings(router__grpc_port=port, router__http_port=0, cluster__name="nobody-runs-this"))
    assert check.result is Result.FAILED
    assert str(port) in check.sentence


def test_clock(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("hpet\n", encoding="ascii")
    assert clock_check(source).result is Result.WARNING
    source.write_text("tsc\n", encoding="ascii")
    assert clock_check(source).result is Result.OK
    assert "unknown" in clock_check(tmp_path / "nothing").sentence


def test_what_is_absent_does_not_fail(tmp_path: Path) -> None:
    checks = [gpu_check(tmp_path), rdma_check(tmp_path / "infiniband"), module_check("nccl", ("no_such_module",), "x")]
    assert [check.result for check in checks] == [Result.ABSENT] * 3
    assert can_serve(checks)
    (tmp_path / "mlx5_0").mkdir()
    assert rdma_check(tmp_path).result is Result.OK
    assert "pytest" in module_check("pytest", ("no_such_module", "pytest"), "x").sentence


def test_one_failure_is_the_verdict() -> None:
    good = Check(name="clock", result=Result.WARNING, sentence="slow")
    bad = Check(name="memory", result=Result.FAILED, sentence="too little")
    assert can_serve([good])
    assert not can_serve([good, bad])
    assert checks_text([good, bad]).endswith("this host cannot serve: memory")
    assert checks_text([good]).endswith("this host can serve")


def test_the_command(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("router:\n  grpc_port: 0\n  http_port: 0\n", encoding="utf-8")
    finished = run_command("doctor", "--model", model, "--config", config, "--json")
    document = finished.document
    assert (finished.code, document["can_serve"]) == (0, True), document
    names = [check["name"] for check in document["checks"]]
    assert {"ops", "versions", "rows (cpu)", "rows (reference)", "gpu", "ports", "shared memory"} <= set(names)
    assert len(names) == len(set(names))
    assert all(set(check) == {"name", "result", "sentence"} and check["sentence"] for check in document["checks"])


def test_the_command_on_a_host_that_cannot_serve(model: Path, tmp_path: Path) -> None:
    """A port that is taken: exit status 1, and the reason."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "settings.yaml"
        port = taken.getsockname()[1]
        config.write_text(f"router:\n  grpc_port: {port}\n  http_port: 0\ncluster:\n  name: nobody\n", encoding="utf-8")
        finished = run_command("doctor", "--model", model, "--config", config)
    assert finished.code == 1, finished.stderr
    assert finished.stdout.splitlines()[-1] == "this host cannot serve: ports"
