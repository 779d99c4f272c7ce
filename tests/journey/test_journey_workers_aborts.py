"""Journeys that end early, at every stage: both workers are back at their baseline, and what follows is served."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DeadlineExceeded, Gone, PdRelayError
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from support.cluster import SECRET, local_workers, worker_processes
from support.player import CALL_TIMEOUT_S, Copy, Player, new_journey, sampling_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Small chunks on the slow ops: a prompt of LONG tokens is still being computed when the next call arrives.
SETTINGS: dict[str, Any] = {"engine": {"cache_mib": 24, "chunk_tokens": 16, "ops": "reference"}}
HASTY: dict[str, Any] = {**SETTINGS, "transfer": {"lease_ms": 3_000, "fetch_timeout_ms": 2_000}}  # leases that run out
LONG = 400
UNENDING = 2_500  # it is cut off, however late this process comes to that


def sampling(max_tokens: int = 8) -> pb.Sampling:
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return sampling_message(params, [], 1)


def prompt(num_tokens: int) -> list[int]:
    return [5 + number % 1_000 for number in range(num_tokens)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Player]:
    async with worker_processes(SETTINGS, tmp_path_factory.mktemp("workers")) as ([prefill], [decode]):
        player = Player(prefill.address, decode.address, SECRET)
        await player.open()
        yield player
        await player.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty_player() -> AsyncIterator[Player]:
    async with local_workers(HASTY) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        yield player
        await player.close()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After every test that used a shared pair."""
    yield
    for name in {"player", "hasty_player"}.intersection(request.fixturenames):
        player: Player = request.getfixturevalue(name)
        await player.until_idle()
        copy = await player.run(prompt(20), sampling(4))
        assert len(copy.token_ids) == 4
        await player.until_idle()


class Stage:
    """A journey that has come so far."""

    def __init__(self, player: Player, num_tokens: int = LONG, max_tokens: int = 8, deadline_ms: int = 0) -> None:
        self.player = player
        self.journey_id = new_journey()
        self.reserve = player.reserve_request(
            self.journey_id, prompt(num_tokens), sampling(max_tokens), deadline_ms=deadline_ms
        )
        self.lease = pb.ReserveReply()
        self.source = pb.SourceInfo()
        self.call: grpc.aio.UnaryStreamCall[pb.PrefillRequest, pb.PrefillReply]

    async def reserved(self) -> Stage:
        self.lease = await self.player.decode.Reserve(self.reserve, timeout=CALL_TIMEOUT_S)
        return self

    async def prefilling(self) -> Stage:
        await self.reserved()
        self.call = self.player.prefill.Prefill(self.player.prefill_request(self.reserve, self.lease))
        reply = await self.call.read()
        assert isinstance(reply, pb.PrefillReply)
        self.source = reply.source
        return self

    async def pulling(self) -> Stage:
        await self.prefilling()
        await self.player.pull(self.reserve, self.lease, self.source)
        return self

    async def decoding(self) -> Stage:
        await self.pulling()
        await self.player.until(self.journey_id, lambda copy: len(copy.tokens) > 1)
        return self

    async def first_token(self) -> pb.FirstToken:
        reply = await self.call.read()
        assert isinstance(reply, pb.PrefillReply)
        return reply.first_token

    async def release(self) -> None:
        await self.player.release(self.journey_id)

    async def failure(self) -> pb.Failure:
        copy = await self.player.until(self.journey_id, Copy.has_ended)
        assert copy.failure is not None
        return copy.failure


async def error_of(call: Any) -> PdRelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return typed_error(caught.value)


@pytest.mark.parametrize("stage", ["reserved", "prefilling", "pulling", "decoding"])
async def test_release_at_every_stage_frees_everything(player: Player, stage: str) -> None:
    journey = Stage(player, num_tokens=40 if stage == "decoding" else UNENDING, max_tokens=1_000)
    await getattr(journey, stage)()
    await journey.release()
    await player.until_idle()
    if stage in ("prefilling", "pulling"):
        assert isinstance(await error_of(journey.call.read()), Gone)
    assert isinstance(await error_of(player.decode.Reserve(journey.reserve, timeout=CALL_TIMEOUT_S)), Gone)


@pytest.mark.parametrize("stage", ["prefilling", "pulling"])
async def test_a_prefill_call_that_is_cancelled_ends_the_work(player: Player, stage: str) -> None:
    journey = Stage(player, num_tokens=UNENDING)
    await getattr(journey, stage)()
    journey.call.cancel()
    if stage == "pulling":
        assert (await journey.failure()).code in ("cancelled", "gone")
    await journey.release()


async def test_cancel_between_finish_and_pull(player: Player) -> None:
    """refused-after-prefill: the prompt is computed, nobody pulls; the pins end with the release."""
    journey = await Stage(player, num_tokens=30).prefilling()
    first = await journey.first_token()
    assert (first.index, first.finish_reason) == (0, "")
    load, _ = await player.loads()
    assert (load.num_pins, load.num_running) == (1, 0)
    await journey.release()


async def test_nobody_comes_back_and_everything_expires(hasty_player: Player) -> None:
    """No release at all: a lease without a pull, a computed prompt without a puller."""
    lease_only = await Stage(hasty_player).reserved()
    pinned = await Stage(hasty_player, num_tokens=30).prefilling()
    await pinned.first_token()
    failure = await lease_only.failure()
    assert (failure.code, failure.retryable) == ("deadline_exceeded", True)
    await hasty_player.until_idle()


async def test_a_router_that_vanishes_ends_its_choices(hasty_player: Player) -> None:
    other = Player(hasty_player.prefill_address, hasty_player.decode_address, SECRET)
    await other.open()
    await Stage(other, num_tokens=30, max_tokens=2_000).decoding()
    await Stage(other).pulling()
    await other.close()
    await hasty_player.until_idle()


async def test_a_release_that_comes_first_makes_the_journey_gone(player: Player) -> None:
    journey = Stage(player)
    await journey.release()
    assert isinstance(await error_of(player.decode.Reserve(journey.reserve, timeout=CALL_TIMEOUT_S)), Gone)
    lease = pb.ReserveReply(lease_id="0" * 32, lease_ms=1_000)
    call = player.prefill.Prefill(player.prefill_request(journey.reserve, lease))
    assert isinstance(await error_of(call.read()), Gone)


async def test_a_higher_attempt_takes_over_and_the_older_one_is_gone(player: Player) -> None:
    old = await Stage(player, num_tokens=UNENDING).pulling()
    new = Stage(player, num_tokens=LONG, max_tokens=3)
    new.journey_id = old.journey_id
    new.reserve.journey.CopyFrom(pb.JourneyRef(journey_id=old.journey_id, attempt=2))
    await new.pulling()
    assert isinstance(await error_of(old.call.read()), Gone)
    assert isinstance(await error_of(player.decode.Reserve(old.reserve, timeout=CALL_TIMEOUT_S)), Gone)
    copy = await player.until(new.journey_id, Copy.has_ended)
    assert copy.finish_reason == "length", copy.failure
    assert len(copy.token_ids) == 3
    await player.release(new.journey_id, attempt=2)


async def test_a_higher_attempt_may_come_while_the_first_tokens_pins_are_held(player: Player) -> None:
    """The release of the older one was lost: its pins end as the new handoff begins, while the new prompt is let in."""
    old = await Stage(player, num_tokens=30).prefilling()
    await old.first_token()
    new = Stage(player, num_tokens=30, max_tokens=3)
    new.journey_id = old.journey_id
    new.reserve.journey.CopyFrom(pb.JourneyRef(journey_id=old.journey_id, attempt=2))
    await new.prefilling()
    assert (await new.first_token()).index == 0
    await player.release(new.journey_id, attempt=2)


async def test_the_requests_deadline_ends_it_in_either_pool(player: Player) -> None:
    journey = Stage(player, num_tokens=3_900, deadline_ms=1_500)

    async def prefilled() -> None:
        await journey.pulling()
        await journey.call.read()

    assert isinstance(await error_of(prefilled()), DeadlineExceeded)
    assert (await journey.failure()).code in ("deadline_exceeded", "cancelled")
    await player.until_idle()
    decoding = await Stage(player, num_tokens=20, max_tokens=3_000, deadline_ms=4_000).pulling()
    failure = await decoding.failure()
    assert (failure.code, failure.retryable) == ("deadline_exceeded", False)
    assert decoding.player.copy(decoding.journey_id).tokens, "nothing had come"


async def test_renew_tells_what_is_known(player: Player) -> None:
    journey = await Stage(player, num_tokens=UNENDING).pulling()
    unknown = pb.JourneyRef(journey_id=new_journey(), attempt=1)
    request = pb.RenewRequest(router_id=player.router_id, journeys=[journey.reserve.journey, unknown])
    prefill = await player.prefill_worker.Renew(request, timeout=CALL_TIMEOUT_S)
    decode = await player.decode_worker.Renew(request, timeout=CALL_TIMEOUT_S)
    assert [state.state for state in prefill.states] == ["running", "gone"]
    assert [state.state for state in decode.states] == ["queued", "gone"]
    await journey.release()
    for worker in (player.prefill_worker, player.decode_worker):
        reply = await worker.Renew(request, timeout=CALL_TIMEOUT_S)
        assert [state.state for state in reply.states] == ["gone", "gone"]


async def test_no_room_is_refused_with_a_hint_and_never_fits_is_told(player: Player) -> None:
    _, load = await player.loads()
    room = load.num_blocks_total * 16
    half = await Stage(player, num_tokens=room // 2).reserved()
    other = Stage(player, num_tokens=room // 2)
    refusal = await error_of(player.decode.Reserve(other.reserve, timeout=CALL_TIMEOUT_S))
    assert refusal.code.value == "resource_exhausted"
    assert refusal.retry_after_ms
    await half.release()
    await other.reserved()
    await other.release()


async def test_prompts_wait_for_blocks_in_turn() -> None:
    """More prompts than the prefill worker has blocks for: each is served, none is refused."""
    settings = {"engine": {"cache_mib": 2, "ops": "reference"}}
    async with local_workers(settings) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        load, _ = await player.loads()
        num_tokens = load.num_blocks_total * 16 // 3
        requests = [
            player.prefill_request(
                player.reserve_request(new_journey(), prompt(num_tokens), sampling(1)), None, no_handoff=True
            )
            for _ in range(5)
        ]

        async def first(request: pb.PrefillRequest) -> int:
            return [reply.first_token.token_id async for reply in player.prefill_replies(request)][-1]

        assert len(set(await asyncio.gather(*(first(request) for request in requests)))) == 1
        await player.until_idle()
        await player.close()


async def again(journey: Stage, player: Player, attempt: int) -> None:
    """The next attempt of that journey, to its end."""
    following = Stage(player, max_tokens=3)
    following.journey_id = journey.journey_id
    following.reserve.journey.CopyFrom(pb.JourneyRef(journey_id=journey.journey_id, attempt=attempt))
    await following.pulling()
    copy = await player.until(journey.journey_id, lambda copy: bool(copy.finish_reason))
    assert len(copy.token_ids) == 3
    await player.release(journey.journey_id, attempt)


async def test_workers_that_die_or_stall_mid_handoff(tmp_path: Path) -> None:
    """Decode reports it within the lease, as something to be placed again; the next attempt elsewhere succeeds; a
    worker that was stopped serves again; what is left on the other side of a dead worker ends by itself."""
    async with worker_processes(HASTY, tmp_path, prefill=2) as ([stopped, killed], [decode]):
        stopped_pair = Player(stopped.address, decode.address, SECRET)
        killed_pair = Player(killed.address, decode.address, SECRET)
        for player in (stopped_pair, killed_pair):
            await player.open()

        journey = await Stage(stopped_pair, max_tokens=3).pulling()
        stopped.signal(signal.SIGSTOP)
        failure = await journey.failure()
        assert failure.retryable, failure
        await again(journey, killed_pair, attempt=2)

        journey = await Stage(killed_pair, max_tokens=3).pulling()
        await killed.kill()
        failure = await journey.failure()
        assert failure.retryable, failure
        stopped.signal(signal.SIGCONT)
        await again(journey, stopped_pair, attempt=2)
        await stopped_pair.until_idle()

        await Stage(stopped_pair).pulling()
        await decode.kill()
        await stopped_pair.until_idle(decode=False)
        for player in (stopped_pair, killed_pair):
            await player.close()
