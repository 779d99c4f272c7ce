"""Workers that join at the same moment must agree too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import FailedPrecondition
from support.router_lab import SECRET, router_lab
from support.stub_worker import StubWorker


async def test_of_two_that_join_at_once_and_differ_one_is_refused() -> None:
    async with router_lab(num_prefill=0, num_decode=0) as lab:
        may_report = asyncio.Event()
        infos = 0

        class Joining(StubWorker):
            async def Info(self, request: pb.InfoRequest, context: Any) -> pb.WorkerInfo:
                nonlocal infos
                infos += 1
                if infos == 2:
                    may_report.set()
                return await super().Info(request, context)

            async def Loads(self, request: pb.LoadsRequest, context: Any) -> AsyncIterator[pb.LoadsReply]:
                await may_report.wait()
                async for reply in super().Loads(request, context):
                    yield reply

        lab.prefill = [Joining("prefill-0", "prefill", secret=SECRET, fingerprint="ab" * 16)]
        lab.decode = [Joining("decode-0", "decode", secret=SECRET, fingerprint="cd" * 16)]
        for worker in lab.stubs:
            await worker.start()
        with pytest.raises(FailedPrecondition, match="is refused: its fingerprint is"):
            await lab.tell_workers()
        states = {link.worker_id: link.state.value for link in lab.router._registry.links()}
        assert sorted(states.values()) == ["ready", "refused"], states
