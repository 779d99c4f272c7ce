"""`pd-relay top` against a router over stub workers."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from pd_ops.commands.top import BAR_CHARS, CLEAR, _watch, bar
from support.commands import run_command
from support.router_lab import eventually, router_lab


async def test_it_looks_once_or_again_and_again() -> None:
    async with router_lab() as lab:
        lab.decode[0].loads = {
            "num_blocks_total": 100, "num_blocks_free": 25, "itl_ms": 3.5, "num_running": 2, "watched_seconds": 1.0,
            "stages": [pb.StageTime(stage="experts", seconds=0.5), pb.StageTime(stage="attention", seconds=0.25)],
        }
        link = lab.router._registry.link("decode-0")
        assert link is not None
        await eventually(lambda: link.loads is not None and link.loads.num_running == 2)
        address = ("--address", lab.grpc_address)
        once = await asyncio.to_thread(run_command, "top", "--looks", "1", *address)
        twice = await asyncio.to_thread(run_command, "top", "--looks", "2", "--interval", "0.1", *address)
        documents = await asyncio.to_thread(
            run_command, "top", "--looks", "2", "--interval", "0.1", "--json", *address
        )
    assert once.code == 0, once.stderr
    lines = once.stdout.splitlines()
    assert lines[0].endswith(": 0 requests on workers, 0 in line")
    [line] = [line for line in lines if line.startswith("decode-0 ")]
    assert line.split()[1:7] == ["ready", "75", "%", "of", "100", "#########..."]
    assert "3.5 ms" in line
    assert CLEAR not in once.stdout
    assert twice.stdout.count(CLEAR) == 2
    looks = documents.events
    assert len(looks) == 2
    assert [worker["id"] for worker in looks[0]["workers"]] == ["prefill-0", "decode-0"]
    assert looks[0]["workers"][1]["num_blocks_free"] == 25
    assert looks[0]["workers"][1]["stage_seconds"] == {"experts": 0.5, "attention": 0.25}
    assert "decode-0: experts 50.0 %, attention 25.0 %, else 25.0 %" in lines
    assert set(looks[0]["router_stage_seconds"]) == {"tokenize", "streaming"}
    others = [line for line in lines if line.startswith(("router:", "prefill-0:"))]
    assert others == ["router: tokenize 0.0 %, streaming 0.0 %, else 100.0 %"]


async def test_a_router_that_is_elsewhere_is_found_again() -> None:
    documents: list[Any] = []
    notes: list[str] = []
    output: Any = SimpleNamespace(document=documents.append, text=lambda text: None, note=notes.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    async with router_lab() as lab:
        places = [gone, lab.grpc_address]
        await _watch(lambda: places.pop(0), output, 0.01, 3)
    assert [note.partition(": ")[0] for note in notes] == [f"no router is reached at {gone}"]
    assert len(documents) == 2


def test_bars() -> None:
    assert (bar(0.0), bar(1.0), bar(7.0)) == ("." * BAR_CHARS, "#" * BAR_CHARS, "#" * BAR_CHARS)
