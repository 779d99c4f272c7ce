"""`pd-relay status` where only half of the cluster answers, and what is said of a router that does not."""

from __future__ import annotations

import asyncio
import socket

from pd_ops.commands.status import processes_lines, processes_text
from support.commands import run_command

MEMBER = {"pid": 7, "restarts": 0, "last_end": None, "address": "127.0.0.1:1"}
PROCESSES = {
    "router": {"id": "router", "state": "waiting", **MEMBER, "restarts": 2, "last_end": "its process ended"},
    "workers": [{"id": "decode-0", "state": "serving", **MEMBER}, {"id": "decode-1", "state": "starting", **MEMBER,
                                                                  "pid": None, "address": None}],
    "hosts": [{"address": "10.0.0.1", "pool": "decode", "free_cpus": 2.0}], "operation": "scale",
}


def test_without_a_router_every_process_is_shown() -> None:
    lines = [" ".join(line.split()) for line in processes_text(PROCESSES).splitlines()]
    assert lines == [
        "process state pid address restarts ended before",
        "router waiting 7 127.0.0.1:1 2 its process ended",
        "decode-0 serving 7 127.0.0.1:1 0",
        "decode-1 starting - - 0",
        "host 10.0.0.1: pool decode, 2 CPUs free",
        "under way: scale",
    ]


def test_with_one_only_those_that_have_something_to_tell() -> None:
    assert processes_lines(PROCESSES) == [
        "router is waiting, restarts: 2 (its process ended)", "decode-1 is starting, restarts: 0",
        "host 10.0.0.1: pool decode, 2 CPUs free", "under way: scale",
    ]
    assert processes_lines({}) == []


async def test_a_router_that_is_not_there_is_said_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for command in ("status", "top", "memory", "trace"):
        looks = ("--looks", "1") if command == "top" else ()
        done = await asyncio.to_thread(run_command, command, *looks, "--address", f"127.0.0.1:{port}")
        assert done.code == 3
        [line] = done.error_lines
        assert line.startswith(f"error: no router is reached at 127.0.0.1:{port}: Connection refused")
