"""The commands that need no cluster, as a user runs them: exit codes, one line of error, JSON and nothing else."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import COMMAND, Finished, environment, run_command

RESULT_KEYS = {
    "token_ids", "text", "finish_reason", "stop_reason", "seed", "logprobs", "usage", "accepted_tokens",
    "drafted_tokens", "handoff", "local_prefill", "warnings",
}


def assert_refused(finished: Finished, message: str, code: int = 2) -> None:
    """One line on standard error, the same in JSON on standard output, no traceback."""
    assert finished.code == code, finished.stderr
    [line] = finished.stderr.splitlines()
    assert line.startswith("error: "), line
    assert message in line
    assert finished.document["error"]["message"] in line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    finished = run_command("random-model", path, "--seed", "3", "--set", "num_hidden_layers=2", "--json")
    assert finished.code == 0, finished.stderr
    assert finished.document["config"]["num_hidden_layers"] == 2
    return path


def test_version() -> None:
    document = run_command("version", "--json").document
    assert document["packages"]["torch"]
    assert run_command("version").stdout.startswith(f"pd-relay {document['version']} ")


def test_generate(model: Path) -> None:
    """Plain in one document, with drafts as a stream: the same answer."""
    arguments = ("generate", "--model", model, "--token-ids", "1,2,3", "--max-tokens", "12", "--seed", "7",
                 "--ignore-eos", "--logprobs", "2", "--temperature", "0.7", "--json")
    finished = run_command(*arguments, "--speculate", "0")
    assert finished.code == 0, finished.stderr
    document = finished.document
    assert set(document) == RESULT_KEYS
    assert len(document["token_ids"]) == 12
    assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "cached_tokens": 0}
    assert (document["finish_reason"], document["seed"], document["drafted_tokens"]) == ("length", 7, 0)
    assert [one["token_id"] for one in document["logprobs"]] == document["token_ids"]
    assert all(len(one["top"]) == 2 and math.isfinite(one["logprob"]) for one in document["logprobs"])

    *steps, complete = run_command(*arguments, "--speculate", "2", "--stream").events
    assert {event["event"] for event in steps} == {"tokens"}
    assert [token for event in steps for token in event["token_ids"]] == document["token_ids"]
    assert "".join(event["text"] for event in steps) == document["text"]
    assert steps[0]["index"] == 0
    assert complete["drafted_tokens"] > 0
    counts = {name: complete[name] for name in ("drafted_tokens", "accepted_tokens")}
    assert complete == {**document, **counts, "event": "complete"}


def test_generate_for_people(model: Path) -> None:
    finished = run_command(
        "generate", "--model", model, "--chat", "--prompt-file", "-", "--max-tokens", "3", "--seed", "1",
        stdin=b"hello",
    )
    assert finished.code == 0, finished.stderr
    assert "[length; 8 + 3 tokens; " in finished.stderr  # BOS, user, five bytes, assistant
    assert "seed 1]" in finished.stderr
    assert finished.stdout.endswith("\n")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--prompt", ""], "the prompt is empty"),
    ([], "give one of --prompt"),
    (["--token-ids", "1,x"], "--token-ids must be numbers"),
    (["--prompt", b"a\xff"], "not UTF-8"),
    (["--prompt-file", "nothing-here"], "No such file"),
    (["--prompt", "a", "--temperature", "nan"], "temperature must be"),
    (["--prompt", "a", "--max-tokens", "0"], "max_tokens must be >= 1"),
    (["--prompt", "a", "--model", "no/such/model"], "no model 'no/such/model'"),
    (["--prompt", "a", "--dtype", "int3"], "engine.dtype"),
    (["--prompt", "a", "--config", "nothing.yaml"], "cannot read settings file"),
    (["--prompt", "a", "--max-tokens", "many"], "--max-tokens"),
    (["--prompt", "a", "--maximum"], "--maximum"),
    (["--prompt"], "--prompt"),
])
def test_bad_input_is_refused(arguments: list[str | bytes], message: str) -> None:
    assert_refused(run_command("generate", "--json", *arguments), message)


def test_a_file_that_is_no_utf8(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"abc\xff")
    assert_refused(run_command("generate", "--prompt-file", file, "--json"), "not UTF-8 at byte 3")


def test_an_unknown_setting_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("engine:\n  thread: 1\n", encoding="utf-8")
    finished = run_command("generate", "--prompt", "a", "--config", file, "--json")
    assert_refused(finished, "did you mean engine.threads?")


@pytest.mark.parametrize(("field", "message"), [
    ("hidden_sise=64", "did you mean hidden_size?"), ("nope=1", "config.json has no such field; known are "),
])
def test_an_unknown_field_of_a_random_model_is_refused(field: str, message: str, tmp_path: Path) -> None:
    assert_refused(run_command("random-model", tmp_path / "model", "--set", field, "--json"), message)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_the_model(model: Path) -> None:
    arguments = ("generate", "--model", model, "--json")
    assert_refused(run_command(*arguments, "--token-ids", "320"), "prompt token ids must be in [0, 320)")
    too_long = ",".join(["1"] * 1024)
    assert_refused(run_command(*arguments, "--token-ids", too_long), "allows 1023 at most")
    assert_refused(run_command(*arguments, "--token-ids", "1", "--max-tokens", "1024"), "max_tokens must be at most")


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["serve"], ["explain-model"], ["verify"]])
def test_a_broken_checkpoint_is_refused_with_names(command: list[str], model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    finished = run_command(*command, "--model", broken, "--json", PD_RELAY_STATE_DIR=str(tmp_path / "state"))
    assert_refused(finished, "missing: ")
    (broken / "config.json").write_text("{", encoding="utf-8")
    finished = run_command(*command, "--model", broken, "--json", PD_RELAY_STATE_DIR=str(tmp_path / "state"))
    assert_refused(finished, "config.json is not JSON")


@pytest.mark.parametrize("command", [["submit", "--prompt", "a"], ["status"], ["stop"]])
def test_without_a_cluster(command: list[str], tmp_path: Path) -> None:
    finished = run_command(*command, "--json", PD_RELAY_STATE_DIR=str(tmp_path))
    assert_refused(finished, "no cluster named 'default' runs on this host; start one with pd-relay serve")


def test_addresses() -> None:
    assert_refused(run_command("status", "--address", "nowhere", "--json"), "an address is HOST:PORT")
    assert_refused(
        run_command("status", "--address", "h:1", "--grpc-port", "1", "--json"), "give --address or --grpc-port"
    )
    assert_refused(run_command("status", "--address", "127.0.0.1:1", "--json"), "127.0.0.1:1", code=3)


def test_explain_model(model: Path) -> None:
    document = run_command("explain-model", "--model", model, "--tokens", "8", "--json").document
    assert document["num_tokens"] == 8
    assert document["dtype"] == "bf16"
    assert {"part", "name", "output", "parameters", "prompt_flops", "token_flops"} <= set(document["stages"][0])
    assert "attention over the cache" in run_command("explain-model", "--model", model).stdout


def test_random_model(model: Path, tmp_path: Path) -> None:
    assert_refused(run_command("random-model", model, "--json"), "is not empty")
    assert_refused(run_command("random-model", tmp_path / "new", "--set", "hidden_size=a", "--json"), "is not JSON")
    assert_refused(run_command("random-model", tmp_path / "new", "--dtype", "int3", "--json"), "--dtype must be")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_where_no_checkpoint_can_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / place
    assert_refused(run_command("random-model", path, "--json"), f"cannot write a checkpoint to {path}: Not a directory")


def test_help_goes_to_standard_output() -> None:
    finished = run_command("--help")
    assert finished.code == 0
    assert "explain-model" in finished.stdout
    assert "--max-tokens" in run_command("submit", "--help").stdout
    assert_refused(run_command("submitt", "--json"), "No such command 'submitt'")
    assert_refused(run_command("scale", "--json"), "pd-relay scale --help says what it takes")


def test_commands_start_light() -> None:
    """Torch costs seconds and 180 MB, which a serving process, a client and help have no use for. Of all commands."""
    script = (
        "import sys\nfrom pd_ops.cli import COMMANDS, build_app\n"
        "for words in ([], *([name] for name in COMMANDS), ['bench', 'engine'], ['bench', 'transfer']):\n"
        "    build_app(words)(args=[*words, '--help'], standalone_mode=False)\n"
        "print('heavy:', *{'torch', 'numpy', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "--region-mib" in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_an_interrupted_answer_says_what_had_come(model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "--model", str(model), "--token-ids", "0,5", "--max-tokens", "1000", "--ignore-eos",
         "--ops", "reference", "--json", "--stream"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    *steps, last = [first, *map(json.loads, stdout.splitlines())]
    assert (process.returncode, stderr) == (130, "[interrupted]\n")
    assert (last["event"], last["interrupted"], last["finish_reason"]) == ("interrupted", True, "cancelled")
    assert last["token_ids"][: len(first["token_ids"])] == first["token_ids"]
    assert last["text"] == "".join(event["text"] for event in steps)


def test_a_command_that_is_interrupted_before_its_result_says_so() -> None:
    script = (
        "import pd_ops.cli\n"
        "def interrupted(words): raise KeyboardInterrupt\n"
        "pd_ops.cli.build_app = interrupted\npd_ops.cli.main(['version', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (130, {"interrupted": True}, "")


def test_a_command_that_is_interrupted_in_its_body_says_so() -> None:
    script = (
        "import pd_ops.cli, pd_ops.commands.doctor as doctor\n"
        "def interrupted(*arguments): raise KeyboardInterrupt\n"
        "doctor.load_settings = interrupted\npd_ops.cli.main(['doctor', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (130, {"interrupted": True}, "")


def test_a_second_interrupt_finds_a_command_that_has_ended() -> None:
    """No traceback of Python's own end."""
    script = (
        "import atexit, os, signal, pd_ops.cli\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "def interrupted(words): raise KeyboardInterrupt\n"
        "pd_ops.cli.build_app = interrupted\npd_ops.cli.main(['version', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (130, {"interrupted": True}, "")


def test_the_readmes_first_prompt_is_answered_without_a_warning() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    line = next(line for line in readme.splitlines() if line.startswith("pd-relay submit "))
    arguments = shlex.split(line, comments=True)[2:]
    finished = run_command("generate", *arguments, "--max-tokens", "1", "--seed", "0", "--ops", "reference")
    assert (finished.code, len(finished.stderr.splitlines())) == (0, 1), finished.stderr
    assert finished.stderr.startswith("[length; ")


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "version", "--json"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
