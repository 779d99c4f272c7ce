"""How the end of a process is noticed: by itself, or because it answers nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pd_engine.errors import Unavailable
from pd_engine.settings import load_settings
from pd_ops.cluster.actors import RouterStarted
from pd_ops.cluster.lives import Lives
from pd_ops.cluster.members import Member
from pd_ops.cluster.plan import plan_cluster


class PretendedActor:
    """Answers `num_answers` questions; then it ends, or hangs until it is killed."""

    def __init__(self, num_answers: int, *, hangs: bool) -> None:
        self.num_questions = 0
        self.killed = False
        self._num_answers = num_answers
        self._hangs = hangs
        self._end = asyncio.Event()

    async def call(self, method: str, *args: Any) -> bool:
        assert method == "is_alive"
        self.num_questions += 1
        if self.num_questions > self._num_answers:
            if self._hangs:
                await asyncio.Event().wait()
            self._end.set()
            raise Unavailable("died")
        return True

    async def ended(self) -> None:
        await self._end.wait()

    def kill(self) -> None:
        self.killed = True
        self._end.set()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def lives(hang_timeout_s: float) -> Lives:
    return Lives(load_settings(None, {"cluster.hang_timeout_s": hang_timeout_s}), host=None, counts_cpus=False)


def member(lives: Lives, actor: PretendedActor, pid: int) -> Member:
    one = lives.new_member(plan_cluster(lives.settings).router)
    one.actor = actor  # type: ignore[assignment]
    one.started = RouterStarted(pid=pid, grpc_address="a:1", http_address="a:2")
    return one


async def test_one_that_dies_is_not_killed(process: subprocess.Popen[bytes]) -> None:
    actor, ours = PretendedActor(2, hangs=False), lives(2.0)
    assert await ours.until_ended(member(ours, actor, process.pid)) == "its process ended"
    assert (actor.num_questions, actor.killed) == (3, False)
    assert process.poll() is None


async def test_one_that_hangs_is_ended_with_its_process(process: subprocess.Popen[bytes]) -> None:
    actor, ours = PretendedActor(1, hangs=True), lives(0.2)
    why = await ours.until_ended(member(ours, actor, process.pid))
    assert why == "it answered nothing for 0.2 s, and was ended"
    assert actor.killed
    assert await asyncio.to_thread(process.wait) == -9
