"""`drain-with-readers`: a prefill worker is told to stop while its blocks are being fetched."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import Unavailable
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from support.cluster import SECRET, worker_processes
from support.player import CALL_TIMEOUT_S, Copy, Player, new_journey, sampling_message

PROMPT = [5 + number % 90 for number in range(600)]
SAMPLING = sampling_message(
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=8, ignore_eos=True), [], 1
)


def settings_of(transport: str) -> dict[str, Any]:
    return {
        "engine": {"cache_mib": 12, "chunk_tokens": 32}, "transfer": {"lease_ms": 30_000, "transport": transport},
    }


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_drain_with_readers(tmp_path: Path, transport: str) -> None:
    """The decode worker is stopped in the middle of its pull; the prefill worker ends only when it has gone on and has
    everything, and takes nothing new meanwhile."""
    async with worker_processes(settings_of(transport), tmp_path) as ([prefill], [decode]):
        player = Player(prefill.address, decode.address, SECRET)
        await player.open()
        expected = (await player.run(PROMPT, SAMPLING)).token_ids
        journey_id = new_journey()
        reserve = player.reserve_request(journey_id, PROMPT, SAMPLING)
        lease = await player.decode.Reserve(reserve, timeout=CALL_TIMEOUT_S)
        async for reply in player.prefill_replies(player.prefill_request(reserve, lease)):
            if reply.HasField("source"):
                await player.pull(reserve, lease, reply.source)
                decode.signal(signal.SIGSTOP)
            else:
                player.copy(journey_id).add(0, [reply.first_token.token_id], [])
        prefill.signal(signal.SIGTERM)
        async for load in player.prefill_worker.Loads(pb.LoadsRequest(interval_ms=20)):
            if load.state == "draining":
                num_pins = load.num_pins
                break
        refusal = await refusal_of_more(player)
        is_running = prefill.process.returncode is None
        decode.signal(signal.SIGCONT)
        assert isinstance(refusal, Unavailable)
        assert is_running, "somebody still reads"
        assert num_pins == 1
        copy = await player.until(journey_id, Copy.has_ended)
        assert copy.failure is None
        assert copy.token_ids == expected
        assert await asyncio.wait_for(prefill.process.wait(), CALL_TIMEOUT_S) == 0
        await player.release(journey_id)
        await player.close()
        decode.signal(signal.SIGTERM)
        assert await asyncio.wait_for(decode.process.wait(), CALL_TIMEOUT_S) == 0
        for worker in (prefill, decode):
            assert "still held" not in worker.log.read_text()


async def refusal_of_more(player: Player) -> Exception:
    """Of another prompt."""
    another = player.prefill_request(player.reserve_request(new_journey(), [5, 6], SAMPLING), None, no_handoff=True)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in player.prefill_replies(another):
            pass
    return typed_error(refused.value)
