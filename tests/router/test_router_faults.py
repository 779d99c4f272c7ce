"""What dies, refuses or lies on the way: the client's stream is the same all the same, or it gets a typed error."""

from __future__ import annotations

import asyncio
import random

import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import (
    Gone,
    Internal,
    InvalidArgument,
    PdRelayError,
    ResourceExhausted,
    Unavailable,
)
from pd_router.link_state import LinkState
from pd_router.waiting_line import Waiter
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.stub_worker import StubWorker
from support.toy_model import toy_generate

ANSWER = toy_generate(PROMPT, 20)


def calls(stub: StubWorker, name: str) -> list[tuple[str, int]]:
    return [(journey, attempt) for call, journey, attempt in stub.calls if call == name]


def all_calls(lab: RouterLab, name: str) -> list[int]:
    return sorted(attempt for stub in lab.stubs for _, attempt in calls(stub, name))


async def check_same_stream(lab: RouterLab, **fields: object) -> None:
    complete = await lab.generate(max_tokens=20, stream=True, logprobs=1, **fields)
    assert list(complete.output_ids) == ANSWER
    assert [entry.token_id for entry in complete.logprobs] == ANSWER
    assert complete.finish_reason == "length"
    assert complete.usage.cached_tokens == 3


async def test_prefill_says_no() -> None:
    """prefill-says-no: an invalid request is answered, and the decode lease is gone."""
    async with router_lab() as lab:
        lab.prefill[0].faults.prefill = [InvalidArgument("not with me")]
        with pytest.raises(InvalidArgument, match="not with me"):
            await lab.generate()
        await lab.assert_no_leaks()
        assert all_calls(lab, "Prefill") == [1]
        assert calls(lab.decode[0], "Release")[0][1] == 1
        assert (await lab.generate()).output_ids


async def test_decode_says_no() -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.reserve = [InvalidArgument("too large for me")]
        with pytest.raises(InvalidArgument, match="too large for me"):
            await lab.generate()
        assert all_calls(lab, "Prefill") == []


async def test_decode_without_room_is_passed_over_before_any_prefill() -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].faults.reserve = [ResourceExhausted("full")]
        lab.decode[0].faults.mute = True  # its next report would say that it has room again
        complete = await lab.generate(max_tokens=20)
        assert list(complete.output_ids) == ANSWER
        assert complete.handoff.decode_worker == "decode-1"
        assert all_calls(lab, "Reserve") == [1, 2]
        assert all_calls(lab, "Prefill") == [2]


async def test_lack_of_room_does_not_count_as_a_failed_attempt() -> None:
    async with router_lab(settings(router={"max_attempts": 1})) as lab:
        lab.decode[0].faults.reserve = [ResourceExhausted("full")] * 3
        await check_same_stream(lab)
        assert all_calls(lab, "Reserve") == [1, 2, 3, 4]


async def test_to_be_given_up_for_want_of_room_is_no_failed_attempt() -> None:
    """However often, and whenever the first token was due: the stream goes on where it was."""
    full = pb.Failure(code="resource_exhausted", message="no room left", retryable=True)
    async with router_lab(settings(router={"max_attempts": 1, "ttft_target_ms": 60_000})) as lab:
        lab.decode[0].faults.fail_at = {3: full, 7: full, 8: full}
        await check_same_stream(lab)
        assert all_calls(lab, "Reserve") == [1, 2, 3, 4]


async def test_a_worker_that_dies_while_sequences_wait_there_is_avoided_all_the_same() -> None:
    """Its new life has room, and is not the next choice of a stream that it has failed."""
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].faults.stall_at = 3
        stream = asyncio.create_task(check_same_stream(lab))
        await eventually(lambda: lab.decode[0].faults.stall_at is None)
        link = lab.router._registry.link(lab.decode[0].worker_id)
        assert link is not None
        lab.decode[0].loads = {"num_preempted": 1}
        await eventually(lambda: not link.load.has_room)
        gate = lab.router._dispatcher._gate
        first = Waiter(is_again=True)  # until it goes, nobody is placed
        gate._calls[first] = asyncio.Event()
        gate._admission.line.join(first)
        await lab.decode[0].kill()
        lab.decode[0].loads = {}
        await eventually(lambda: link.state is not LinkState.READY)
        await lab.decode[0].start()
        await eventually(lambda: link.state is LinkState.READY and link.load.has_room)
        gate._admission.leave(first)
        gate._call_head()
        await stream
        assert [len(calls(stub, "Reserve")) for stub in lab.decode] == [1, 1]


async def test_the_next_attempt_takes_over_the_blocks_of_the_last_one() -> None:
    """There is room for one lease, which lasts longer than this test."""
    async with router_lab(num_prefill=2, num_blocks=2) as lab:
        for stub in lab.prefill:
            stub.faults.prefill = [Unavailable("busy dying")]
        await check_same_stream(lab)
        assert all_calls(lab, "Reserve") == [1, 2, 3]


async def test_who_has_its_blocks_already_passes_those_that_wait_for_room() -> None:
    """They may wait for the very room that it has."""
    async with router_lab(num_prefill=2, num_blocks=2) as lab:
        for stub in lab.prefill:
            stub.faults.prefill_gate = asyncio.Event()
        stream = asyncio.create_task(check_same_stream(lab))
        await eventually(lambda: any(calls(stub, "Prefill") for stub in lab.prefill))
        first, second = sorted(lab.prefill, key=lambda stub: not calls(stub, "Prefill"))
        gate = lab.router._dispatcher._gate
        waiting = Waiter(is_again=True)
        gate._calls[waiting] = asyncio.Event()
        gate._admission.line.join(waiting)
        assert second.faults.prefill_gate is not None
        second.faults.prefill_gate.set()
        await first.kill()
        await stream
        gate._admission.leave(waiting)


async def test_a_lease_that_is_not_taken_over_is_released() -> None:
    """The next attempt is placed elsewhere, as the worker with its blocks takes nothing new."""
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        for stub in lab.prefill:
            stub.faults.prefill_gate = asyncio.Event()
        stream = asyncio.create_task(check_same_stream(lab))
        await eventually(lambda: any(calls(stub, "Pull") for stub in lab.decode))
        [holder] = [stub for stub in lab.decode if calls(stub, "Reserve")]
        first, second = sorted(lab.prefill, key=lambda stub: not calls(stub, "Prefill"))
        link = lab.router._registry.link(holder.worker_id)
        assert link is not None
        holder.state = "draining"
        await eventually(lambda: link.state is LinkState.DRAINING)
        await first.kill()
        await eventually(lambda: bool(calls(second, "Prefill")))
        await eventually(lambda: not holder.leases)  # while the next attempt is at it
        assert second.faults.prefill_gate is not None
        second.faults.prefill_gate.set()
        await stream


async def test_a_full_prefill_queue_is_passed_over() -> None:
    async with router_lab(num_prefill=2) as lab:
        lab.prefill[0].faults.prefill = [ResourceExhausted("queue is full")]
        lab.prefill[0].faults.mute = True
        complete = await lab.generate(max_tokens=20)
        assert list(complete.output_ids) == ANSWER
        assert complete.handoff.prefill_worker == "prefill-1"


@pytest.mark.parametrize("where", ["reserve", "prefill", "pull"])
@pytest.mark.parametrize("error", [Unavailable("busy dying"), Gone()])
async def test_a_retryable_answer_is_tried_elsewhere(where: str, error: PdRelayError) -> None:
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        for stub in lab.stubs:
            getattr(stub.faults, where).append(error)
        setattr(lab.stubs[-1].faults, where, [])  # the last one of each pool is healthy
        setattr(lab.prefill[1].faults, where, [])
        await check_same_stream(lab)


async def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    async with router_lab() as lab:
        lab.prefill[0].faults.prefill = [Unavailable(f"no {i}") for i in range(9)]
        with pytest.raises(Unavailable, match="no 2"):
            await lab.generate()
        assert all_calls(lab, "Prefill") == [1, 2, 3]


async def test_an_internal_error_is_not_tried_again() -> None:
    async with router_lab(num_prefill=2) as lab:
        for stub in lab.prefill:
            stub.faults.prefill = [Internal("a bug")]
        with pytest.raises(Internal, match="a bug"):
            await lab.generate()
        assert all_calls(lab, "Prefill") == [1]


async def test_prefill_dies_while_it_computes() -> None:
    """The lease stays: the next attempt goes to the same decode worker, and to another prefill worker."""
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        lab.prefill[0].faults.prefill_gate = asyncio.Event()
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await lab.prefill[0].arrived["Prefill"].wait()
        await eventually(lambda: any(calls(stub, "Pull") for stub in lab.decode))
        [decode] = [stub for stub in lab.decode if calls(stub, "Pull")]
        await lab.prefill[0].kill()
        complete = await running
        assert list(complete.output_ids) == ANSWER
        assert complete.handoff.prefill_worker == "prefill-1"
        assert [attempt for _, attempt in calls(decode, "Reserve")] == [1, 2]
        assert "Release" not in [name for name, _, attempt in decode.calls if attempt == 1]


async def test_lost_first_reply() -> None:
    """lost-first-reply: the prefill call breaks after the handoff; index 0 comes once, from decode, with logprobs."""
    async with router_lab(settings(transfer={"lease_ms": 60_000})) as lab:  # so long it has to come
        lab.prefill[0].faults.no_first_reply = 1
        await check_same_stream(lab)
        assert all_calls(lab, "Reserve") == [1]


@pytest.mark.parametrize("index", [0, 1, 7, 18])
async def test_decode_dies_mid_stream_and_the_stream_goes_on(index: int) -> None:
    async with router_lab(num_decode=2) as lab:
        for stub in lab.decode:
            stub.faults.die_at = index
        lab.decode[1].faults.die_at = None
        await check_same_stream(lab)
        dead, alive = lab.decode
        assert calls(dead, "Reserve")[0][1] == 1
        [reserve] = [r for r in alive.requests if r.DESCRIPTOR.name == "ReserveRequest"]
        assert reserve.journey.attempt == 2
        assert reserve.num_prompt_tokens == len(PROMPT)
        assert list(reserve.token_ids) == PROMPT + ANSWER[: reserve.num_emitted_tokens]
        assert reserve.num_emitted_tokens <= index or index == 0
        await dead.start()


async def test_the_only_decode_worker_dies_and_comes_back() -> None:
    """A new life on the same address: nothing is restarted, the journey waits for it and goes on."""
    async with router_lab() as lab:
        lab.decode[0].faults.die_at = 5
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await eventually(lambda: lab.decode[0]._server is None)
        await lab.decode[0].start()
        assert list((await running).output_ids) == ANSWER


async def test_one_token_is_left_when_decode_fails() -> None:
    """The last token needs no handoff: prefill samples it, and no decode worker is asked again."""
    async with router_lab() as lab:
        lab.decode[0].faults.fail_at = {19: pb.Failure(code="unavailable", message="x", retryable=True)}
        await check_same_stream(lab)
        last = lab.prefill[0].requests[-1]
        assert last.no_handoff
        assert list(last.token_ids) == PROMPT + ANSWER[:19]
        assert all_calls(lab, "Reserve") == [1]


@pytest.mark.parametrize("index", [0, 1, 11])
async def test_a_retryable_failure_of_decode_is_placed_again(index: int) -> None:
    async with router_lab(num_decode=2) as lab:
        failure = pb.Failure(code="data_loss", message="blocks do not match", retryable=True)
        lab.decode[0].faults.fail_at = {index: failure}
        await check_same_stream(lab)
        assert all_calls(lab, "Reserve") == [1, 2]


async def test_a_final_failure_of_decode_reaches_the_client() -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.fail_at = {4: pb.Failure(code="internal", message="computing failed", retryable=False)}
        received: list[int] = []

        async def read() -> None:
            async for response in lab.stream(lab.request(max_tokens=20, stream=True)):
                received.extend(response.chunk.token_ids)

        with pytest.raises(Internal, match="computing failed"):
            await read()
        assert received == ANSWER[: len(received)]
        assert len(received) <= 4


async def test_a_token_that_contradicts_is_never_sent() -> None:
    """A worker that repeats index 0 with another token has lost its data: the attempt is placed again."""
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].faults.wrong_token_at = 0
        lab.decode[0].burst = 4
        complete = await lab.generate(max_tokens=20, stream=True)
        if complete.output_ids[0] == ANSWER[0]:
            assert list(complete.output_ids) == ANSWER
        assert all_calls(lab, "Reserve") == [1, 2]


async def test_a_worker_that_forgot_the_journey_is_found_by_renewal() -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].faults.stall_at = 6
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await lab.decode[0].arrived["stall"].wait()
        for lease in lab.decode[0].leases.values():
            assert lease.task is not None
            lease.task.cancel()
        lab.decode[0].leases.clear()
        assert list((await running).output_ids) == ANSWER


async def test_late_tokens_of_an_older_attempt_are_ignored() -> None:
    """Even from the same worker, in the same life."""
    async with router_lab() as lab:
        [decode] = lab.decode
        decode.faults.fail_at = {3: pb.Failure(code="unavailable", message="x", retryable=True)}
        decode.faults.stall_at = 8
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await decode.arrived["stall"].wait()
        [(journey, first), (_, second)] = calls(decode, "Reserve")
        assert (first, second) == (1, 2)
        [lease] = decode.leases.values()
        old = pb.JourneyRef(journey_id=journey, attempt=first)
        decode._tell(lease, pb.TokensEvent(journey=old, index=8, token_ids=[4000, 4001]))
        decode._tell(lease, pb.TokensEvent(journey=old, failure=pb.Failure(code="internal", message="late")))
        failure = pb.Failure(code="unavailable", message="stalled", retryable=True)
        decode._tell(lease, pb.TokensEvent(journey=lease.request.journey, failure=failure))
        assert list((await running).output_ids) == ANSWER


async def test_workers_that_are_removed_hand_their_journeys_on() -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].faults.stall_at = 4
        running = asyncio.create_task(lab.generate(max_tokens=20, stream=True))
        await lab.decode[0].arrived["stall"].wait()
        gone = lab.decode.pop(0)
        await lab.tell_workers()
        assert list((await running).output_ids) == ANSWER
        gone.assert_no_leaks()  # it was told before it was forgotten
        await gone.kill()


async def test_a_restarted_worker_with_another_model_is_refused() -> None:
    async with router_lab(num_decode=2) as lab:
        await lab.decode[0].kill()
        lab.decode[0]._info["fingerprint"] = "ee" * 16
        await lab.decode[0].start()
        await eventually(lambda: any(link.state.value == "refused" for link in lab.router._registry.links()))
        assert (await lab.generate()).handoff.decode_worker == "decode-1"


async def test_streams_survive_random_deaths() -> None:
    """Twenty streams while workers die and come back at random moments: each gets exactly its tokens."""
    rng = random.Random(7)
    config = settings(router={"max_attempts": 16})
    async with router_lab(config, num_prefill=2, num_decode=3) as lab:
        gate = asyncio.Event()
        for stub in lab.prefill:
            stub.faults.prefill_gate = gate
        prompts = [[200 + i, 9, 9] for i in range(20)]
        running = [asyncio.create_task(lab.generate(prompt, max_tokens=40, stream=True)) for prompt in prompts]
        await eventually(lambda: sum(len(calls(stub, "Prefill")) for stub in lab.prefill) == 20)
        for _ in range(6):
            victim = rng.choice(lab.stubs)
            if victim.role == "decode":
                victim.faults.die_at = rng.randrange(0, 40)
            else:
                await victim.kill()
                await victim.start()
        gate.set()
        is_over = asyncio.Event()
        reviver = asyncio.create_task(_revive(lab, is_over))
        for prompt, task in zip(prompts, running, strict=True):
            assert list((await task).output_ids) == toy_generate(prompt, 40)
        is_over.set()
        await reviver
        for stub in lab.stubs:
            stub.faults.die_at = None
            if stub._server is None:
                await stub.start()
        await eventually(lambda: all(link.state.value == "ready" for link in lab.router._registry.links()))


async def _revive(lab: RouterLab, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        for stub in lab.stubs:
            if stub._server is None:
                await stub.start()
        await asyncio.sleep(0.02)
