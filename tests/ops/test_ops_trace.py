"""`pd-relay trace` against a router over stub workers."""

from __future__ import annotations

import asyncio

from pd_ops.commands.trace import BAR_CHARS, bar
from support.commands import run_command
from support.router_lab import eventually, router_lab


async def test_a_request_and_the_slowest() -> None:
    async with router_lab() as lab:
        await lab.generate(request_id="mine")
        await lab.generate()
        await eventually(lambda: lab.router.num_running == 0)
        address = ("--address", lab.grpc_address)
        one = await asyncio.to_thread(run_command, "trace", "mine", *address)
        listed = await asyncio.to_thread(run_command, "trace", *address, "--json")
        unknown = await asyncio.to_thread(run_command, "trace", "other", *address)
    assert one.code == 0, one.stderr
    lines = one.stdout.splitlines()
    assert lines[0].startswith("request mine, choice 0: length, 5 prompt tokens (3 cached), 8 tokens, first token")
    assert [line.split()[0] for line in lines[2:6]] == ["request", "queue", "attempt", "reserve"]
    assert "=" * BAR_CHARS in lines[2]
    assert "decode_worker decode-0" in lines[4]
    traces = listed.document["traces"]
    assert len(traces) == 2
    assert {"request_id", "trace_id", "end", "error", "ttft_ms", "total_ms", "spans"} <= traces[0].keys()
    assert unknown.code == 2
    assert "no ended request other is kept" in unknown.stderr


def test_bars_are_never_empty_and_never_too_long() -> None:
    assert bar(0, 100, 100) == "=" * BAR_CHARS
    assert bar(100, 100, 100) == " " * (BAR_CHARS - 1) + "="
    assert bar(50, 50.001, 100) == " " * (BAR_CHARS // 2) + "="
    assert bar(0, 0, 0) == ""
