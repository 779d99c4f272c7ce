"""A router that takes the place of another one: nobody who comes to it is told that there are no workers."""

from __future__ import annotations

from typing import Any

import pytest

from pd_router.server import FIRST_WORKERS_S, Router, WorkerEndpoint
from support.router_lab import SECRET, router_lab, settings


@pytest.fixture
async def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each router, when it opened its doors: whether it could serve, and how many workers it knew."""
    seen: list[tuple[bool, int]] = []
    open_doors = Router._open_doors

    async def open_and_note(router: Router) -> Any:
        seen.append((router._registry.serving, len(router._registry.links())))
        return await open_doors(router)

    monkeypatch.setattr(Router, "_open_doors", open_and_note)
    return seen


async def test_it_has_its_workers_when_it_opens_its_doors(opened: list[tuple[bool, int]]) -> None:
    async with router_lab(num_decode=2) as lab:
        other = Router(settings(), secret=SECRET)
        await other.start(lab.endpoints())
        await other.stop(0)
    assert opened == [(False, 0), (True, 3)]


async def test_it_does_not_wait_long_for_one_that_does_not_answer(opened: list[tuple[bool, int]]) -> None:
    async with router_lab() as lab:
        other = Router(settings(), secret=SECRET)
        await other.start([*lab.endpoints(), WorkerEndpoint("decode-9", "decode", "127.0.0.1:9")])
        await other.stop(0)
    assert opened[-1] == (True, 3)
    assert FIRST_WORKERS_S < 2
