"""What ends leases and pins in time: if its books break, somebody is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kv_transfer.destination import HandoffDestination
from kv_transfer.source import HandoffSource
from kv_transfer.ticker import Ticker
from kv_transfer.transports.loopback import FaultPlan, LoopbackNetwork, LoopbackPull, LoopbackSource
from pd_engine.settings import TransferSettings
from support.handoffs import DestinationSide, SourceSide, new_key, running
from support.leaks import until

QUICK = TransferSettings(lease_ms=200)


async def test_it_ticks_until_it_is_stopped() -> None:
    ticked = 0

    async def tick() -> None:
        nonlocal ticked
        ticked += 1

    ticker = Ticker("ticks", 0.001, tick, lambda error: None)
    await ticker.stop()
    ticker.start()
    await until(lambda: ticked > 3)
    await ticker.stop()
    await ticker.stop()
    at_end = ticked
    await asyncio.sleep(0.02)
    assert ticked == at_end


@pytest.mark.parametrize("what", ["source", "destination", "owner"])
async def test_broken_books_are_told(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Of either side, in a tick; or by a call to who owns what has come."""
    crashes: list[Exception] = []
    network = LoopbackNetwork()
    settings = TransferSettings() if what == "owner" else QUICK
    source = SourceSide(settings=settings, transports=[LoopbackSource(network)])
    side = DestinationSide(
        settings=settings, make_transports=lambda arena: [LoopbackPull(network, arena, FaultPlan())]
    )

    def broken(*_: Any) -> None:
        raise AssertionError("planted")

    source.source._ticker._on_crash = side.destination._ticker._on_crash = crashes.append
    side.destination._on_crash = crashes.append
    if what == "owner":
        side.destination._on_complete = broken
    else:
        monkeypatch.setattr(HandoffSource if what == "source" else HandoffDestination, "tick", broken)
    async with running(source, side):
        if what == "owner":
            key = new_key()
            info = source.begin(key, 20)
            source.publish_all(key, 20)
            side.reserve_and_pull(key, 20, info)
        async with asyncio.timeout(20):
            await until(lambda: len(crashes) > 0)
        assert str(crashes[0]) == "planted"
