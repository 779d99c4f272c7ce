"""Hostile and mistaken calls get their typed error, touch nothing, and the workers live on."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import AlreadyExists, FailedPrecondition, Gone, InvalidArgument, PdRelayError, Unauthenticated
from pd_engine.sampling.params import SamplingParams
from pd_engine.service import client
from pd_engine.service.client import typed_error
from support.cluster import SECRET, local_workers
from support.player import CALL_TIMEOUT_S, Copy, Player, is_idle, new_journey, sampling_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 8, "max_context_length": 512}, "prefill": {"max_queued_tokens": 600},
}
HEX = "0" * 32
INTERNAL = "/pdrelay.internal.v1."
METHODS = [
    "Worker/Info", "Worker/Loads", "Worker/Tokens", "Worker/CacheEvents", "Worker/Renew", "Worker/Release",
    "PrefillWorker/Prefill", "DecodeWorker/Reserve", "DecodeWorker/Pull", "KvSource/Manifest", "KvSource/SourceRenew",
    "KvSource/Commit", "KvSource/Hold",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player() -> AsyncIterator[Player]:
    async with local_workers(SETTINGS) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        yield player
        await player.close()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def workers_live_on(player: Player) -> AsyncIterator[None]:
    yield
    await player.until_idle()
    copy = await player.run([5, 6, 7], good_sampling())
    assert copy.finish_reason == "length"
    await player.until_idle()


def good_sampling() -> pb.Sampling:
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=3, ignore_eos=True)
    return sampling_message(params, [], 1)


def reserve_request(player: Player) -> pb.ReserveRequest:
    return player.reserve_request(new_journey(), [5, 6, 7], good_sampling())


def prefill_request(player: Player) -> pb.PrefillRequest:
    lease = pb.ReserveReply(lease_id=HEX, lease_ms=2_000)
    return player.prefill_request(reserve_request(player), lease)


async def error_of(call: Any) -> PdRelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return typed_error(caught.value)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """Sets a field, nested by dots; lists are replaced."""

    def change(message: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    return change


BAD_IN_BOTH = [
    ("journey.journey_id", ""), ("journey.journey_id", "x" * 32), ("journey.journey_id", "a" * 10_000),
    ("journey.attempt", 0), ("journey.attempt", 2**32 - 1),
    ("router_id", ""), ("router_id", "r" * 1_000), ("router_id", "a\x00b"),
    ("token_ids", []), ("token_ids", [4096]), ("token_ids", [2**32 - 1]), ("token_ids", [5] * 512),
    ("token_ids", [5] * 100_000),
    ("num_prompt_tokens", 0), ("num_prompt_tokens", 4), ("num_prompt_tokens", 2**32 - 1),
    ("sampling.max_tokens", 0), ("sampling.max_tokens", 2**32 - 1), ("sampling.temperature", float("nan")),
    ("sampling.temperature", -1.0), ("sampling.temperature", float("inf")), ("sampling.top_p", 0.0),
    ("sampling.top_p", 2.0), ("sampling.top_k", 0), ("sampling.top_k", -7), ("sampling.logprobs", 21),
    ("sampling.min_p", 1.5), ("sampling.repetition_penalty", 0.0), ("sampling.repetition_penalty", float("nan")),
    ("sampling.presence_penalty", 3.0), ("sampling.frequency_penalty", float("inf")), ("sampling.min_tokens", 2**31),
    ("sampling.logprobs", -2), ("sampling.speculate", 9), ("sampling.stop_token_ids", [4096]),
    ("sampling.stop_token_ids", list(range(1_000))), ("cache_salt", "s" * 300),
    ("priority", 1_001), ("priority", -(2**31)),
]


@pytest.mark.parametrize(("path", "value"), [*BAD_IN_BOTH, ("block_hashes", [b"x"]), ("block_hashes", [bytes(16)] * 9)])
async def test_a_bad_reserve_is_refused(player: Player, path: str, value: Any) -> None:
    request = reserve_request(player)
    _set(path, value)(request)
    error = await error_of(player.decode.Reserve(request, timeout=CALL_TIMEOUT_S))
    assert isinstance(error, InvalidArgument), error
    assert len(error.message) < 500


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *BAD_IN_BOTH, ("lease_id", ""), ("lease_id", "z" * 32), ("lease_ms", 0), ("lease_ms", 2**32 - 1),
        ("num_held_blocks", 1), ("num_held_blocks", 2**32 - 1),
    ],
)
async def test_a_bad_prefill_is_refused(player: Player, path: str, value: Any) -> None:
    request = prefill_request(player)
    _set(path, value)(request)
    error = await error_of(player.prefill.Prefill(request, timeout=CALL_TIMEOUT_S).read())
    assert isinstance(error, InvalidArgument), error


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("journey.journey_id", "no"), ("lease_id", "no"), ("source.address", ""), ("source.address", "unix:/tmp/x"),
        ("source.address", "h:99999"), ("source.epoch", "no"), ("source.token", "no"), ("source.token", "A" * 32),
    ],
)
async def test_a_bad_pull_is_refused_and_the_lease_stays(player: Player, path: str, value: Any) -> None:
    request = reserve_request(player)
    lease = await player.decode.Reserve(request, timeout=CALL_TIMEOUT_S)
    pull = pb.PullRequest(
        journey=request.journey, lease_id=lease.lease_id,
        source=pb.SourceInfo(address="127.0.0.1:1", epoch=HEX, token=HEX),
    )
    _set(path, value)(pull)
    assert isinstance(await error_of(player.decode.Pull(pull, timeout=CALL_TIMEOUT_S)), InvalidArgument)
    renewed = await player.decode_worker.Renew(pb.RenewRequest(journeys=[request.journey]), timeout=CALL_TIMEOUT_S)
    assert [state.state for state in renewed.states] == ["queued"]
    await player.release(request.journey.journey_id)


@pytest.mark.parametrize("wrong", ["address", "epoch", "token", "lease"])
async def test_a_pull_from_nowhere_fails_for_this_journey_only(player: Player, wrong: str) -> None:
    request = reserve_request(player)
    lease = await player.decode.Reserve(request, timeout=CALL_TIMEOUT_S)
    call = player.prefill.Prefill(player.prefill_request(request, lease), timeout=CALL_TIMEOUT_S)
    reply = await call.read()
    assert isinstance(reply, pb.PrefillReply)
    pull = pb.PullRequest(journey=request.journey, lease_id=lease.lease_id, source=reply.source)
    if wrong == "lease":
        pull.lease_id = HEX
        assert isinstance(await error_of(player.decode.Pull(pull, timeout=CALL_TIMEOUT_S)), Gone)
    else:
        setattr(pull.source, wrong, "127.0.0.1:1" if wrong == "address" else HEX)
        await player.decode.Pull(pull, timeout=CALL_TIMEOUT_S)
        copy = await player.until(request.journey.journey_id, Copy.has_ended)
        assert copy.failure is not None
        assert copy.failure.code == ("unavailable" if wrong == "address" else "gone")
        assert copy.failure.retryable
    await player.release(request.journey.journey_id)


async def test_the_same_attempt_with_another_payload_is_refused(player: Player) -> None:
    request = reserve_request(player)
    lease = await player.decode.Reserve(request, timeout=CALL_TIMEOUT_S)
    call = player.prefill.Prefill(player.prefill_request(request, lease), timeout=CALL_TIMEOUT_S)
    await call.read()
    request.token_ids[0] = 9
    assert isinstance(await error_of(player.decode.Reserve(request, timeout=CALL_TIMEOUT_S)), AlreadyExists)
    other = player.prefill.Prefill(player.prefill_request(request, lease), timeout=CALL_TIMEOUT_S)
    assert isinstance(await error_of(other.read()), AlreadyExists)
    await player.release(request.journey.journey_id)


async def test_a_request_that_can_never_fit_is_told_so(player: Player) -> None:
    """one-giant: the others go on."""
    request = reserve_request(player)
    request.sampling.max_tokens = 511
    assert isinstance(await error_of(player.decode.Reserve(request, timeout=CALL_TIMEOUT_S)), InvalidArgument)


async def test_a_full_queue_is_refused_with_a_hint(player: Player) -> None:
    calls = []
    refusal: PdRelayError | None = None
    for _ in range(8):
        request = prefill_request(player)
        _set("token_ids", [7] * 300)(request)
        request.num_prompt_tokens = 300
        call = player.prefill.Prefill(request, timeout=CALL_TIMEOUT_S)
        calls.append(call)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            refusal = typed_error(error)
            break
    for call in calls:
        call.cancel()
    assert refusal is not None
    assert refusal.code.value == "resource_exhausted"
    assert refusal.retry_after_ms


async def test_a_prefill_worker_streams_no_tokens(player: Player) -> None:
    call = player.prefill_worker.Tokens(pb.TokensRequest(router_id="r"), timeout=CALL_TIMEOUT_S)
    assert isinstance(await error_of(call.read()), FailedPrecondition)


async def test_lists_are_bounded_and_checked_before_anything_is_done(player: Player) -> None:
    request = reserve_request(player)
    await player.decode.Reserve(request, timeout=CALL_TIMEOUT_S)
    bad = [pb.JourneyRef(journey_id="no", attempt=1)]
    for refs in ([request.journey, *bad], [request.journey] * 20_000):
        for worker in (player.prefill_worker, player.decode_worker):
            error = await error_of(worker.Release(pb.ReleaseRequest(journeys=refs), timeout=CALL_TIMEOUT_S))
            assert isinstance(error, InvalidArgument)
            error = await error_of(worker.Renew(pb.RenewRequest(journeys=refs), timeout=CALL_TIMEOUT_S))
            assert isinstance(error, InvalidArgument)
    _, load = await player.loads()
    assert load.num_leases == 1
    await player.release(request.journey.journey_id)


async def test_a_stranger_gets_nothing(player: Player) -> None:
    for secret in (None, "not-the-secret-of-this-cluster"):
        for address in (player.prefill_address, player.decode_address):
            async with client.connect(address, secret) as channel:
                for method in METHODS:
                    call = channel.unary_unary(INTERNAL + method)
                    error = await error_of(call(b"", timeout=CALL_TIMEOUT_S))
                    assert isinstance(error, Unauthenticated) or "Method not found" in error.message, (method, error)
    assert all(is_idle(load) for load in await player.loads())


async def test_random_bytes_get_typed_errors(player: Player) -> None:
    rng = random.Random(7)
    for channel in (player.prefill_channel, player.decode_channel):
        for method in METHODS:
            call = channel.unary_stream(INTERNAL + method)
            for size in (1, 7, 64, 4_096):
                stream = call(rng.randbytes(size), timeout=CALL_TIMEOUT_S)
                try:
                    await stream.read()
                    stream.cancel()
                except grpc.aio.AioRpcError as error:
                    assert typed_error(error).code.value != "internal", (method, error)  # noqa: PT017
