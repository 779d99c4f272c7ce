"""Which workers a router takes, and what it says of itself and of them."""

from __future__ import annotations

import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import (
    FailedPrecondition,
)
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.toy_model import toy_generate


async def test_unequal_shapes_are_refused_at_connection() -> None:
    """unequal-shapes: both values are named; the others go on."""
    for field, values in {
        "fingerprint": ("ab" * 16, "cd" * 16),
        "block_size": (16, 32),
        "dtype": ("bf16", "fp32"),
    }.items():
        lab = RouterLab(settings())
        await lab.start()
        try:
            odd = type(lab.decode[0])("odd", "decode", secret=lab.decode[0]._secret, **{field: values[1]})
            await odd.start()
            lab.decode.append(odd)
            with pytest.raises(FailedPrecondition) as caught:
                await lab.tell_workers()
            message = caught.value.message
            assert f"worker odd is refused: its {field} is {values[1]!r}" in message
            assert f"has {values[0]!r}" in message
            info = await lab.api.GetServerInfo(api.GetServerInfoRequest())
            assert {worker.id: worker.state for worker in info.workers}["odd"] == "refused"
            assert list((await lab.generate()).output_ids) == toy_generate(PROMPT, 8)
            await lab.assert_no_leaks()
        finally:
            await lab.stop()


async def test_somebody_else_at_the_address_is_refused() -> None:
    async with router_lab() as lab:
        lab.decode[0].worker_id, old = "impostor", lab.decode[0].worker_id
        endpoint = lab.endpoints()[0]
        with pytest.raises(FailedPrecondition, match="its worker_id is 'prefill-0', expected 'other'"):
            await lab.router.set_workers([type(endpoint)("other", "prefill", endpoint.address)])
        lab.decode[0].worker_id = old
        await lab.tell_workers()


async def test_a_draining_worker_gets_nothing_new() -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].state = "draining"
        await eventually(lambda: any(link.state.value == "draining" for link in lab.router._registry.links()))
        for _ in range(4):
            assert (await lab.generate()).handoff.decode_worker == "decode-1"


async def test_infos_and_loads() -> None:
    async with router_lab(num_decode=2) as lab:
        model = await lab.api.GetModelInfo(api.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("demo", 4096, 4096)
        assert (model.block_size, model.bytes_per_token, model.dtype) == (16, 5760, "bf16")
        assert list(model.eos_token_ids) == [1]
        assert model.fingerprint == "ab" * 16
        server = await lab.api.GetServerInfo(api.GetServerInfoRequest())
        assert server.server_type == "pd-relay-router"
        assert [(w.id, w.role, w.state, w.num_blocks_total) for w in server.workers] == [
            ("prefill-0", "prefill", "ready", 1024),
            ("decode-0", "decode", "ready", 1024),
            ("decode-1", "decode", "ready", 1024),
        ]
        assert server.router_rss_bytes > 0
        loads = await lab.api.GetLoads(api.GetLoadsRequest())
        assert {load.worker_id for load in loads.loads} == {"prefill-0", "decode-0", "decode-1"}


async def test_health_follows_the_workers_and_reflection_lists_the_service() -> None:
    async with router_lab() as lab, grpc.aio.insecure_channel(lab.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="pdrelay.v1.PdRelay"))
        states = health_pb2.HealthCheckResponse

        async def until(status: int) -> None:
            while (await watch.read()).status != status:
                pass

        await until(states.SERVING)
        await lab.decode[0].kill()
        await until(states.NOT_SERVING)
        await lab.decode[0].start()
        await until(states.SERVING)
        watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = [answer async for answer in reflection.ServerReflectionInfo(iter([question]))]
        assert "pdrelay.v1.PdRelay" in {service.name for service in answer.list_services_response.service}


async def test_it_says_for_how_long_a_worker_has_been_as_it_is() -> None:
    async with router_lab(num_decode=2) as lab:
        links = {link.worker_id: link for link in lab.router._registry.links()}
        await eventually(lambda: all(link.state.value == "ready" for link in links.values()))
        began_s = time.monotonic()
        lab.decode[0].state = "draining"
        await eventually(lambda: links["decode-0"].state.value == "draining")
        info = await lab.api.GetServerInfo(api.GetServerInfoRequest())
        passed_ms = 1e3 * (time.monotonic() - began_s)
        state_ms = {worker.id: worker.state_ms for worker in info.workers}
        assert state_ms["decode-0"] <= passed_ms + 1
        assert state_ms["decode-1"] > state_ms["decode-0"], "it has been ready since before"
