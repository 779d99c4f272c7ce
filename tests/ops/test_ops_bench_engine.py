"""`bench engine` on a tiny model, as few rounds as there can be: shapes and sums, never speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pd_engine.errors import Unavailable
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_ops.bench.child import Child
from support.commands import COMMAND, environment, run_command

ROW_KEYS = {
    "model", "case", "batch", "prompt_tokens", "dtype", "speculate", "acceptance", "tokens_per_s", "peer",
    "peer_tokens_per_s", "ratio", "ratio_low", "ratio_high", "rounds",
}
QUICK = ("--rounds", "1", "--min-seconds", "0", "--steps", "3", "--batch", "2", "--prompt-tokens", "20", "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most drafts are accepted."""
    path = tmp_path_factory.mktemp("bench") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=5, layer_scale=0.1)
    return path


def options(model: Path, **more: object) -> str:
    return json.dumps({
        "model": str(model), "dtype": "bf16", "threads": 1, "ops": "reference", "cache_mib": 16, "temperature": 0.0,
        **more,
    })


def engine_process(*arguments: str) -> Child:
    return Child("pd-relay", [sys.executable, "-m", "pd_ops.bench.engine_process", *arguments], threads=1)


@pytest.mark.slow
def test_beside_transformers(model: Path) -> None:
    """fp32: both sides compute the same function, so the greedy tokens are the same."""
    finished = run_command("bench", "engine", "--model", model, "--dtype", "fp32", "--peers", "transformers", *QUICK)
    assert finished.code == 0, finished.stderr
    document = finished.document
    assert [(row["case"], row["batch"], row["prompt_tokens"], row["speculate"]) for row in document["rows"]] == [
        ("decode", 2, 16, 0), ("decode", 2, 16, 1), ("prefill", 1, 20, 0),
    ]
    for row in document["rows"]:
        assert set(row) == ROW_KEYS
        assert (row["dtype"], row["peer"], row["rounds"]) == ("fp32", "transformers", 1)
        assert row["tokens_per_s"] > 0
        assert row["peer_tokens_per_s"] > 0
    assert [row["acceptance"] is not None for row in document["rows"]] == [False, True, False]
    [engine] = document["engines"]
    [peer] = engine["peers"]
    assert peer["same_greedy_tokens"] == peer["of"] > 0
    assert len(engine["fingerprint"]) == 32
    assert document["failures"] == []
    assert document["interrupted"] is False
    assert document["threads"] == 1
    assert "median" in document["statistic"]


def test_without_peers_for_people(model: Path) -> None:
    arguments = [argument for argument in QUICK if argument != "--json"]
    finished = run_command("bench", "engine", "--model", model, "--dtype", "bf16", "--peers", "none", *arguments)
    assert finished.code == 0, finished.stderr
    assert "outside the model" in finished.stdout
    assert "what drafts are worth" in finished.stdout
    assert "round 1 of 1" in finished.stderr


def test_a_peer_that_cannot_be_set_up_is_said(model: Path, tmp_path: Path) -> None:
    """One that is set up and does not start: a line, and the others are measured."""
    python = tmp_path / "vllm-cpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "vllm-cpu" / ".ready").touch()
    finished = run_command(
        "bench", "engine", "--model", model, "--dtype", "bf16", "--peers", "vllm-cpu,llama-cpp", "--peers-dir",
        tmp_path, *QUICK,
    )
    assert finished.code == 0, finished.stderr
    document = finished.document
    assert len(document["rows"]) == 3
    [failure] = document["failures"]
    assert "no such library" in failure
    assert document["missing_peers"][0]["name"] == "llama-cpp"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--peers", "ollama"], "--peers takes"),
    (["--dtype", "int3"], "--dtype must be"),
    (["--model", "no/such/model"], "no model"),
    (["--rounds", "0"], "--rounds"),
])
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    finished = run_command("bench", "engine", *QUICK, *arguments)
    assert finished.code == 2, finished.stderr
    assert message in finished.document["error"]["message"]


def test_a_case_that_does_not_fit_is_left_out_and_said(model: Path) -> None:
    finished = run_command(
        "bench", "engine", "--model", model, "--dtype", "bf16", "--peers", "none", *QUICK, "--prompt-tokens", "5000"
    )
    assert finished.code == 0, finished.stderr
    assert "prefill 5000 left out: the model's context is 1024 tokens" in finished.stderr
    assert {row["prompt_tokens"] for row in finished.document["rows"]} == {16, 20}


def test_ctrl_c_keeps_what_was_measured(model: Path) -> None:
    """Interrupted in its second case: the first one's rows are printed, and no process is left."""
    process = subprocess.Popen(
        [*COMMAND, "bench", "engine", "--model", str(model), "--dtype", "bf16", "--peers", "none", "--rounds", "100",
         *QUICK[2:], "--prompt-tokens", "1000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "prefill" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    document = json.loads(stdout)
    assert document["interrupted"] is True
    assert [row["case"] for row in document["rows"]] == ["decode", "decode"]


@pytest.mark.parametrize("speculate", [0, 1])
@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_every_step_counts_into_its_parts(model: Path, ops: str, speculate: int) -> None:
    """Also where an engine repeats what an earlier step has recorded: each step has its calls of the model."""
    prompts = [[10, 11, 12], [20, 21, 22, 23]]
    with closing(engine_process(options(model, ops=ops))) as child:
        child.ready()
        answer = child.ask({
            "call": "measure", "case": "decode", "prompts": prompts, "num_steps": 6, "speculate": speculate,
            "min_s": 0.0,
        })
    parts = answer["parts"]
    num_steps = parts["num_steps"]
    assert 3 <= num_steps < 6 if speculate else num_steps == 6, "as many as give as many tokens"
    assert 12 <= answer["num_tokens"] < 12 + 2 * (1 + speculate)
    assert answer["num_tokens"] == 2 * num_steps + parts["num_accepted"]
    assert parts["num_model_calls"] >= num_steps * (1 + speculate)
    assert parts["num_drafted"] == 2 * num_steps * speculate
    assert (0 < parts["step_draft_cpu_s"] < answer["cpu_s"]) or not speculate
    assert ("verify_cpu_s" in parts) == ("draft_cpu_s" in parts) == bool(speculate)
    assert 0 < parts["model_s"] + parts["sampling_s"] <= answer["wall_s"]


def test_greedy_is_the_same_in_every_call(model: Path) -> None:
    with closing(engine_process(options(model))) as child:
        child.ready()
        request = {"call": "greedy", "prompt": [10, 11, 12], "num_tokens": 5}
        first, second = child.ask(request), child.ask(request)
    assert first == second
    assert len(first["token_ids"]) == 5


def test_a_failed_request_is_an_error_and_the_next_one_is_answered(model: Path) -> None:
    with closing(engine_process(options(model))) as child:
        child.ready()
        with pytest.raises(Unavailable, match="KeyError"):
            child.ask({"call": "measure"})
        assert child.ask({"call": "greedy", "prompt": [10], "num_tokens": 2})["token_ids"]
        assert not child.has_ended


def test_a_process_that_cannot_load_says_why(tmp_path: Path) -> None:
    with closing(engine_process(options(tmp_path / "nothing"))) as child, pytest.raises(Unavailable, match="NotFound"):
        child.ready()
