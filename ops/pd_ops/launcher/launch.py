"""A cluster of many hosts from its launcher file: brought up, watched until it serves, and taken down."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray.autoscaler._private.util import prepare_config, validate_config

from pd_engine.errors import FailedPrecondition, InvalidArgument, PdRelayError, Unavailable, from_code
from pd_engine.yaml_file import read_yaml_mapping
from pd_ops.launcher.cluster_file import WHAT, ClusterFile
from pd_ops.launcher.end_host import MARK
from pd_ops.launcher.host_provider import host_state_file
from pd_ops.launcher.remote_shell import PYTHON, NoSuchCommand, on_all

SERVE_FILE = "~/pd-relay-serve.jsonl"  # as the head's start commands name it
LAUNCH_TIMEOUT_S = 3600.0  # setup on the head: an environment is made there the first time
END_TIMEOUT_S = 120.0
POLL_S = 0.5
MAX_SHOWN_LINES = 12

Tell = Callable[[str], None]


def bring_up(file: ClusterFile, timeout_s: float, tell: Tell) -> dict[str, Any]:
    """Returns what `serve` said when it was ready.

    Raises:
        InvalidArgument: Ray would not take the file.
        Unavailable: hosts are not reached, all of them named; or nothing serves in time.
        FailedPrecondition: Ray's launcher failed.
        PdRelayError: that `serve` ended with.
    """
    check_schema(file)
    check_reach(file, tell)
    tell("starting Ray on the head; it starts the others")
    _ray("up", "-y", "--no-config-cache", str(file.path))
    tell("waiting for the hosts, and for the workers on them")
    return _wait_ready(file, timeout_s, tell)


def check_schema(file: ClusterFile) -> None:
    """Raises:
    InvalidArgument: Ray's schema of launcher files does not allow it, such as a key that nobody knows.
    """
    logging.getLogger(prepare_config.__module__).setLevel(logging.ERROR)  # it warns of keys that it adds itself
    try:
        validate_config(prepare_config(read_yaml_mapping(file.path, WHAT)))
    except Exception as error:  # noqa: BLE001 - of many kinds; a schema's says where
        where = getattr(error, "json_path", "$").removeprefix("$").removeprefix(".")
        message = getattr(error, "message", str(error))
        raise InvalidArgument(f"{file.path}: {f'{where}: ' if where else ''}{message}") from None


def check_reach(file: ClusterFile, tell: Tell) -> None:
    """Raises:
    Unavailable: the head, or more hosts of a kind than it can spare, are not reached.
    """
    answers = on_all(file.hosts, lambda host: file.shell.run(host, "true"))
    missing = {host: str(answer) for host, answer in answers.items() if not isinstance(answer, str)}
    for kind in file.node_types:
        out = [missing[host] for host in kind.hosts if host in missing]
        if out and (kind.pool is None or len(kind.hosts) - len(out) < kind.min_workers):
            raise Unavailable(f"{kind.name}: {'; '.join(out)}")
        for sentence in out:
            tell(f"{kind.name}: {sentence}; there are enough others")


def take_down(file: ClusterFile, tell: Tell) -> dict[str, Any]:
    """By host, the processes that were ended and those that are left. The head is first: it would start others again.

    Raises:
        Unavailable: hosts are not reached, or processes are left; all others are done by then.
    """
    if file.head_host is None:
        try:
            _on_head(file, f"{PYTHON} -m pd_ops.launcher.end_host", END_TIMEOUT_S)
        except PdRelayError as error:  # its hosts are given back all the same: they cost money
            tell(f"requests that run are not waited for: {error.message}")
        _ray("down", "-y", str(file.path))
        return {}
    results: dict[str, Any] = {}
    for hosts in ([file.head_host], [host for host in file.hosts if host != file.head_host]):
        tell(f"ending {', '.join(hosts)}")
        results |= on_all(hosts, lambda host: _end_host(file, host))
    host_state_file(file.name, on_head=False).remove()
    return _ended(results, tell)


def _end_host(file: ClusterFile, host: str) -> str:
    """What its stop command says.

    Raises:
        NoSuchCommand: there is none, and nothing that it would end.
        Unavailable, FailedPrecondition: it failed, or there is none although processes may be left.
    """
    try:
        return file.shell.run(host, file.stop_command, timeout_s=END_TIMEOUT_S)
    except NoSuchCommand as error:
        if file.shell.run(host, ask_what_is_left(MARK)).split()[-1:] != ["none"]:
            raise Unavailable(f"{error.message}, and processes may be left there") from None
        raise


def ask_what_is_left(mark: bytes) -> str:
    """A command that says "none" where no process has `mark` in its environment. It needs no Python."""
    return f"grep -qs {mark.decode()} /proc/[0-9]*/environ; case $? in 0) echo some;; 1|2) echo none;; esac"


def _ended(results: dict[str, Any], tell: Tell) -> dict[str, Any]:
    faults, documents = [], {}
    for host, answer in results.items():
        if isinstance(answer, NoSuchCommand):
            tell(f"{host} was never set up, so nothing is ended there: {answer.message}")
        elif not isinstance(answer, str):
            faults.append(str(answer))
        elif (document := _ended_there(answer)) is None:
            faults.append(f"{host} does not say what it has ended: {answer.strip()[-200:]!r}")
        elif document["left"]:
            faults.append(f"{host} has processes left: {document['left']}")
        else:
            documents[host] = document
    if faults:
        raise Unavailable("; ".join(faults))
    return documents


def _ended_there(said: str) -> dict[str, Any] | None:
    """What `end_host` prints last."""
    document = next(iter(whole_documents(f"{said.strip()}\n")[-1:]), {})
    return document if {"ended", "left"} <= document.keys() else None


def _wait_ready(file: ClusterFile, timeout_s: float, tell: Tell) -> dict[str, Any]:
    deadline_s, num_told, trouble = time.monotonic() + timeout_s, 0, ""
    while time.monotonic() < deadline_s:
        try:
            documents = whole_documents(_on_head(file, f"cat {SERVE_FILE}"))
            notes = _on_head(file, f"cat {SERVE_FILE}.log").splitlines()
        except Unavailable as error:  # for a moment, perhaps: the head is busy
            if error.message != trouble:
                tell(error.message)
            trouble = error.message
        else:
            for note in notes[num_told:]:
                tell(note)
            num_told = len(notes)
            if (ready := _ready_event(documents)) is not None:
                return ready
        time.sleep(POLL_S)
    raise Unavailable(f"the cluster was not ready in {timeout_s:g} s; {SERVE_FILE}.log on the head says more")


def _ready_event(documents: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Raises:
    PdRelayError: that `serve` ended with.
    """
    for event in documents:
        if "error" in event:
            raise from_code(event["error"]["code"], event["error"]["message"])
        if event.get("event") == "ready":
            return event
    return None


def whole_documents(text: str) -> list[dict[str, Any]]:
    """The lines that are: one may be half written, and Ray's launcher and login shells add their own."""
    documents: list[dict[str, Any]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("}\n"):
            with contextlib.suppress(ValueError):
                documents.append(json.loads(line))
    return documents


def _on_head(file: ClusterFile, command: str, timeout_s: float = 30.0) -> str:
    if file.head_host is not None:
        return file.shell.run(file.head_host, command, timeout_s=timeout_s)
    return _ray("exec", "--no-config-cache", str(file.path), command)


def _ray(*arguments: str) -> str:
    """Raises:
    FailedPrecondition: it failed; with the end of what it said.
    """
    command: Sequence[str] = (sys.executable, "-m", "ray.scripts.scripts", *arguments)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"ray {arguments[0]} did not end in {LAUNCH_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise FailedPrecondition(f"ray {arguments[0]} failed: {' | '.join(said[-MAX_SHOWN_LINES:])}")
    return done.stdout
