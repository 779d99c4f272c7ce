"""`pd-relay top` against a router over stub workers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_ops.commands import top
from pd_ops.commands.top import CLEAR, _watch
from pd_ops.output import Document
from pd_ops.top_screen import BAR_CHARS, Screen, bar, history
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
    assert lines[0].endswith(": 0 requests on workers, 0 in line; 0 handoffs, 0.0 MB")
    [line] = [line for line in lines if line.startswith("  decode-0 ")]
    assert line.split()[1:7] == ["ready", "75", "%", "of", "100", "#########..."]
    assert "3.5 ms" in line
    assert CLEAR not in once.stdout + twice.stdout, "no terminal reads it"
    assert twice.stdout.count("cluster ") == 2
    looks = documents.events
    assert len(looks) == 2
    assert [worker["id"] for worker in looks[0]["workers"]] == ["prefill-0", "decode-0"]
    assert looks[0]["workers"][1]["num_blocks_free"] == 25
    assert looks[0]["workers"][1]["stage_seconds"] == {"experts": 0.5, "attention": 0.25}
    assert "decode-0: experts 50.0 %, attention 25.0 %, else 25.0 %" in lines
    assert set(looks[0]["router_stage_seconds"]) == {"tokenize", "streaming"}
    assert "decode pool: experts 50.0 %, attention 25.0 %, else 25.0 %" in lines
    others = [line for line in lines if line.startswith(("router:", "prefill-0:", "prefill pool:"))]
    assert others == ["router: tokenize 0.0 %, streaming 0.0 %, else 100.0 %"]


async def test_a_router_that_is_elsewhere_is_found_again() -> None:
    documents: list[Any] = []
    notes: list[str] = []
    output: Any = SimpleNamespace(
        document=documents.append, text=lambda text: None, note=notes.append, is_terminal=True
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    async with router_lab() as lab:
        places = [gone, lab.grpc_address]
        await _watch(lambda: places.pop(0), output, 0.01, 3)
    assert [note.partition(": ")[0] for note in notes] == [f"no router is reached at {gone}"]
    assert len(documents) == 2


async def test_an_interrupt_leaves_a_router_that_does_not_answer() -> None:
    async def never(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    output: Any = SimpleNamespace(document=None, text=None, note=None, is_terminal=True)
    client: Any = SimpleNamespace(server_info=never, all_loads=never)

    @asynccontextmanager
    async def router_client(address: str) -> AsyncIterator[Any]:
        yield client

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top, "router_client", router_client)
        async with asyncio.timeout(60):
            await _watch(lambda: "a:1", output, 0.01, None)


def look(uptime_s: float, **of_worker: Any) -> Document:
    worker = {
        "id": "decode-0", "role": "decode", "epoch": "a", "state": "ready", "num_blocks_total": 100,
        "num_blocks_free": 50, "num_quarantined_blocks": 0, "num_running": 1, "num_waiting": 0, "num_preempted": 0,
        "num_leases": 0, "num_pins": 0,
        "queued_prefill_tokens": 0, "prefill_tokens_per_s": 0.0, "itl_ms": 0.0, "rss_bytes": 0,
        "fetched_bytes_total": 0, "stage_seconds": {}, "watched_seconds": 0.0,
    }
    return {
        "cluster": "c", "uptime_seconds": uptime_s, "requests_running": 0, "requests_waiting": 0,
        "num_handoffs_total": 10 * uptime_s, "handoff_bytes_total": 5e6 * uptime_s, "num_drafted_total": 4 * uptime_s,
        "num_accepted_total": 3 * uptime_s, "router_stage_seconds": {"tokenize": 0.0, "streaming": 0.5 * uptime_s},
        "expert_max_over_mean": {"decode": [1.5, None]}, "workers": [worker | of_worker],
    }


def test_later_looks_show_what_was_since() -> None:
    """Rates and shares of the time between two looks; what was not watched since stays as it was."""
    screen = Screen()
    screen.text(look(10, stage_seconds={"experts": 90.0}, watched_seconds=100.0, fetched_bytes_total=1_000_000))
    since = {"stage_seconds": {"experts": 90.5}, "watched_seconds": 102.0}
    lines = screen.text(look(12, **since, fetched_bytes_total=5_000_000, num_blocks_free=0)).splitlines()
    assert lines[0].endswith("10.0 handoffs/s, 5.0 MB/s; 75 % of drafts accepted")
    [row] = [line for line in lines if line.startswith("  decode-0 ")]
    assert "2.0 MB" in row, "in a second"
    assert history([0.5, 1.0]) in row
    assert f"decode-0: experts 25.0 % {history([0.9, 0.25])}, else 75.0 % {history([0.1, 0.75])}" in lines
    assert f"decode pool: experts 25.0 % {history([0.9, 0.25])}, else 75.0 % {history([0.1, 0.75])}" in lines
    assert lines[-1] == "busiest expert over the mean, by layer: decode 1.50 -"
    idle = screen.text(look(13, **since)).splitlines()
    assert any(line.startswith("decode-0: experts 25.0 % ") for line in idle)


def test_another_life_begins_anew() -> None:
    screen = Screen()
    screen.text(look(10, stage_seconds={"experts": 90.0}, watched_seconds=100.0, fetched_bytes_total=9_000_000))
    other = {"epoch": "b", "stage_seconds": {"experts": 0.5}, "watched_seconds": 1.0}
    assert "decode-0: experts 50.0 %" in screen.text(look(11, **other))
    assert "30 handoffs, 15.0 MB" in screen.text(look(3, **other)), "another router"


def test_bars() -> None:
    assert (bar(0.0), bar(1.0), bar(7.0)) == ("." * BAR_CHARS, "#" * BAR_CHARS, "#" * BAR_CHARS)
