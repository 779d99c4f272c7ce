"""When a worker counts as lost, and when nobody waits for another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import PdRelayError, Unavailable
from pd_router.lifeline import WorkerLifeline
from pd_router.link import MAX_TICK_S, WorkerLink
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.stub_worker import StubWorker
from support.toy_model import toy_generate

ANSWER = toy_generate(PROMPT, 20)
FOR_EVER_MS = 10_000_000


def attempts(lab: RouterLab, name: str) -> list[int]:
    return sorted(attempt for stub in lab.stubs for call, _, attempt in stub.calls if call == name)


def link_to(lab: RouterLab, stub: StubWorker) -> WorkerLink:
    link = lab.router._registry.link(stub.worker_id)
    assert link is not None
    return link


def be_lost_after(link: WorkerLink, silence_s: float) -> None:
    """This worker alone: that the machine is busy loses no other."""
    link._silence_s = link.calls._silence_s = silence_s


async def test_late_renewals_lose_nobody() -> None:
    """The worker reports as ever; what journeys have there goes on."""
    async with router_lab() as lab:
        [decode] = lab.decode
        decode.faults.renew_gate = asyncio.Event()
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await decode.arrived["Pull"].wait()
        link_to(lab, decode).calls._silence_s = 0.2  # for an answer; it may be silent for as long as ever
        decode.num_renewals = 0
        await eventually(lambda: decode.num_renewals >= 3)  # two of them were given up
        gate.set()
        assert list((await running).output_ids) == ANSWER
        assert attempts(lab, "Reserve") == [1]
        assert all(link.state.value == "ready" for link in lab.router._registry.links())


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_silent_worker_is_lost(role: str) -> None:
    """Its connection stays, as a stopped process's does; another one of its pool takes over."""
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        pool = lab.prefill if role == "prefill" else lab.decode
        for stub in pool:
            stub.faults.stall_at = 7
            stub.faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        arrived = "Prefill" if role == "prefill" else "stall"
        await eventually(lambda: any(stub.arrived[arrived].is_set() for stub in pool))
        [silent] = [stub for stub in pool if stub.arrived[arrived].is_set()]
        [other] = [stub for stub in pool if stub is not silent]
        other.faults.stall_at = other.faults.prefill_gate = None
        silent.faults.mute = True
        link = link_to(lab, silent)
        be_lost_after(link, 0.5)
        assert list((await running).output_ids) == ANSWER
        assert link.state.value == "lost"
        silent.faults.mute = False
        await eventually(lambda: link.state.value == "ready")


async def test_a_router_that_was_stopped_itself_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it slept: it has not listened."""
    async with router_lab() as lab:
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        running = asyncio.create_task(lab.generate(max_tokens=20))
        await lab.prefill[0].arrived["Prefill"].wait()
        loop = asyncio.get_running_loop()
        now, slept_s = loop.time, 1.2 * settings().router.worker_silence_ms / 1000
        monkeypatch.setattr(loop, "time", lambda: now() + slept_s)
        await asyncio.sleep(0)
        gate.set()
        assert list((await running).output_ids) == ANSWER
        assert attempts(lab, "Reserve") == [1]


async def test_a_router_that_is_late_again_and_again_finds_a_silent_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its looks counts as one in time would: not more, as what a worker said may wait to be read."""
    async with router_lab() as lab:
        [decode] = lab.decode
        link = link_to(lab, decode)
        decode.faults.mute = True
        loop = asyncio.get_running_loop()
        now, late_s, num_looks = loop.time, 0.0, 0
        monkeypatch.setattr(loop, "time", lambda: now() + late_s)
        enough = round(link._silence_s / MAX_TICK_S)
        while link.state.value == "ready" and num_looks < 2 * enough:
            late_s += 2.5 * MAX_TICK_S
            num_looks += 1
            for _ in range(5):
                await asyncio.sleep(0)
        assert link.error is not None and "has said nothing for" in link.error.message
        assert enough / 2 <= num_looks < 2 * enough


async def tell_of_the_end(lab: RouterLab, *ended: str) -> None:
    await lab.router.set_workers(
        [replace(endpoint, is_expected=endpoint.worker_id not in ended) for endpoint in lab.endpoints()]
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nobody_waits_for_a_worker_that_will_not_come_back(role: str) -> None:
    async with router_lab(settings(router={"recovery_wait_ms": FOR_EVER_MS, "max_attempts": 16})) as lab:
        stub = lab.prefill[0] if role == "prefill" else lab.decode[0]
        stub.faults.stall_at = 5
        stub.faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await stub.arrived["Prefill" if role == "prefill" else "stall"].wait()
        await stub.kill()
        await tell_of_the_end(lab, stub.worker_id)
        with pytest.raises(Unavailable, match=rf"no worker is left.*{stub.worker_id}: its process has ended"):
            await running


async def test_a_worker_that_may_come_back_is_waited_for_until_it_is_known_to_have_ended() -> None:
    async with router_lab(settings(router={"recovery_wait_ms": FOR_EVER_MS})) as lab:
        [decode] = lab.decode
        decode.faults.die_at = 5
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await eventually(lambda: decode._server is None)
        await tell_of_the_end(lab)
        await asyncio.sleep(0)
        assert not running.done()
        await tell_of_the_end(lab, "decode-0")
        with pytest.raises(Unavailable, match="no worker is left"):
            await running
        await decode.start()
        await tell_of_the_end(lab)
        await eventually(lambda: lab.router._registry.serving)
        assert list((await lab.generate(max_tokens=20)).output_ids) == ANSWER


async def test_no_prefill_left() -> None:
    """no-prefill-left, refusing: at once, and nothing is dispatched to decode; service resumes by itself."""
    async with router_lab(settings(router={"recovery_wait_ms": FOR_EVER_MS})) as lab:
        await lab.prefill[0].kill()
        await tell_of_the_end(lab, "prefill-0")
        with pytest.raises(PdRelayError) as caught:
            await lab.generate()
        assert isinstance(caught.value, Unavailable)
        assert caught.value.retry_after_ms
        assert attempts(lab, "Reserve") == []
        await lab.prefill[0].start()
        await lab.tell_workers()
        await eventually(lambda: lab.router._registry.serving)
        assert list((await lab.generate(max_tokens=20)).output_ids) == ANSWER


async def test_late_tokens_of_a_worker_that_was_stopped_are_dropped() -> None:
    """It goes on while another one has taken over; what it says then is of an attempt that is over."""
    async with router_lab(settings(router={"max_attempts": 8}), num_decode=2) as lab:
        for stub in lab.decode:
            stub.faults.stall_at = 7
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await eventually(lambda: any(stub.arrived["stall"].is_set() for stub in lab.decode))
        [stopped] = [stub for stub in lab.decode if stub.arrived["stall"].is_set()]
        [other] = [stub for stub in lab.decode if stub is not stopped]
        [old] = stopped.leases.values()
        other.faults.stall_at = 12
        stopped.faults.mute = True
        link = link_to(lab, stopped)
        be_lost_after(link, 0.5)
        await eventually(lambda: other.arrived["stall"].is_set())
        before = list(stopped.streams.values())
        be_lost_after(link, 60.0)
        stopped.faults.mute = False
        await eventually(
            lambda: link.state.value == "ready" and not any(queue in before for queue in stopped.streams.values())
        )
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        stopped.arrived["Reserve"].clear()
        await other.kill()
        await stopped.arrived["Reserve"].wait()  # the journey is there again
        for index in range(7, 20):
            late = pb.TokensEvent(journey=old.request.journey, index=index, token_ids=[9])
            stopped._tell(old, late)
        gate.set()
        assert list((await running).output_ids) == ANSWER
        assert attempts(lab, "Reserve")[-1] >= 3


async def test_a_worker_whose_lifeline_ends_is_lost_while_its_streams_still_stand() -> None:
    """Its process has been killed, and the kernel has not come to close them."""
    async with router_lab(num_decode=2) as lab:
        lines: list[asyncio.StreamWriter] = []
        held = await asyncio.start_server(lambda _, writer: lines.append(writer), "127.0.0.1", 0)
        stub = lab.decode[0]
        stub._info["lifeline_port"] = held.sockets[0].getsockname()[1]
        link = link_to(lab, stub)
        link._lose(Unavailable("so that it asks again"))
        link._task.cancel()
        link._task = asyncio.create_task(link._run())
        await eventually(lambda: link.state.value == "ready" and len(lines) == 1)
        stub._info["lifeline_port"] = 0
        held.close()
        lines[0].close()
        await eventually(lambda: link.error is not None and "its process is gone" in link.error.message)
        await eventually(lambda: link.state.value == "ready")


async def test_a_silent_worker_is_lost_soon_where_its_host_does_not_answer_either(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose host answers may be silent for longer."""
    num_asked = 0

    def is_unanswered(_: WorkerLifeline) -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > 3

    monkeypatch.setattr(WorkerLifeline, "is_unanswered", is_unanswered)
    async with router_lab(settings(router={"worker_silence_ms": FOR_EVER_MS})) as lab:
        stub, link = lab.decode[0], link_to(lab, lab.decode[0])
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as held:
            stub._info["lifeline_port"] = held.sockets[0].getsockname()[1]
            link._lose(Unavailable("so that it asks again"))
            link._task.cancel()
            link._task = asyncio.create_task(link._run())
            await eventually(lambda: link.state.value == "ready")
            stub.faults.mute = True
            await eventually(lambda: link.state.value == "lost")
            assert link.error is not None and "and its host have said nothing" in link.error.message
            assert num_asked == 4


async def test_a_lifeline_that_is_not_reached_loses_nobody() -> None:
    async with router_lab() as lab:
        stub, link = lab.decode[0], link_to(lab, lab.decode[0])
        stub._info["lifeline_port"] = 9  # nobody listens there
        link._lose(Unavailable("so that it asks again"))
        link._task.cancel()
        link._task = asyncio.create_task(link._run())
        await eventually(lambda: link.state.value == "ready" and link.info is not None and link.info.lifeline_port == 9)
        assert list((await lab.generate(max_tokens=20)).output_ids) == ANSWER
        assert link.state.value == "ready"


async def test_what_ends_a_lifeline_while_its_port_is_open_loses_nobody() -> None:
    """Something between, such as a proxy, that lets connect and hangs up."""
    async with router_lab() as lab:
        num_ended = 0

        def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_ended
            num_ended += 1
            writer.close()

        async with await asyncio.start_server(end, "127.0.0.1", 0) as between:
            stub, link = lab.decode[0], link_to(lab, lab.decode[0])
            stub._info["lifeline_port"] = between.sockets[0].getsockname()[1]
            link._lose(Unavailable("so that it asks again"))
            link._task.cancel()
            link._task = asyncio.create_task(link._run())
            await eventually(lambda: num_ended == 2 and link.state.value == "ready")
            assert list((await lab.generate(max_tokens=20)).output_ids) == ANSWER
            assert (link.state.value, num_ended) == ("ready", 2)
