"""Requests through a router over stub workers: what the client gets, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from pd_engine.model.checkpoint import resolve_model
from pd_engine.sampling.params import seed_from_request_id
from pd_engine.text.chat import ChatMessage
from pd_router.model_info import ModelInfo
from support.router_lab import PROMPT, RouterLab, eventually, router_lab, settings
from support.stub_worker import next_token, toy_generate


async def test_a_request_through_both_pools() -> None:
    async with router_lab() as lab:
        complete = await lab.generate(max_tokens=8, request_id="abc", speculate=1, stream=True)
        expected = toy_generate(PROMPT, 8)
        assert list(complete.output_ids) == expected
        assert complete.finish_reason == "length"
        assert complete.text == ModelInfo.load(settings()).tokenizer.decode(expected)
        assert complete.usage == api.Usage(prompt_tokens=5, completion_tokens=8, cached_tokens=3)
        assert complete.seed == seed_from_request_id("abc")
        assert complete.handoff == api.Handoff(
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            bytes=5 * 5760,
            transport="stub",
            block_checksums=[1, 2],
        )
        assert (complete.drafted_tokens, complete.accepted_tokens) == (8, 4)
        assert [name for name, _, _ in lab.prefill[0].calls][:1] == ["Prefill"]
        assert [name for name, _, _ in lab.decode[0].calls][:2] == ["Reserve", "Pull"]


async def test_what_workers_are_asked() -> None:
    async with router_lab() as lab:
        await lab.generate(
            list(range(5, 45)),
            max_tokens=3,
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            seed=2**64 - 1,
            logprobs=2,
            stop_token_ids=[9],
            request_id="r",
            cache_salt="s",
            placement=api.Placement(report_block_checksums=True),
        )
        [reserve] = [r for r in lab.decode[0].requests if r.DESCRIPTOR.name == "ReserveRequest"]
        [prefill] = lab.prefill[0].requests
        assert list(reserve.token_ids) == list(prefill.token_ids) == list(range(5, 45))
        assert reserve.num_prompt_tokens == prefill.num_prompt_tokens == 40
        assert len(reserve.block_hashes) == 2
        sampling = reserve.sampling
        assert sampling == prefill.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
        assert (sampling.seed, sampling.max_tokens, sampling.logprobs, sampling.speculate) == (2**64 - 1, 3, 2, 1)
        assert list(sampling.stop_token_ids) == [1, 9]
        assert reserve.report_block_checksums
        assert not reserve.bypass_prefix_cache
        assert reserve.cache_salt == prefill.cache_salt == "s"
        assert 0 < prefill.deadline_ms <= 600_000
        assert prefill.lease_id
        assert prefill.journey == reserve.journey
        assert len(prefill.journey.journey_id) == 32


async def test_defaults_are_the_checkpoints_and_never_the_protos() -> None:
    async with router_lab() as lab:
        request = api.GenerateRequest(tokenized=api.TokenizedInput(input_ids=[5] * 4090))
        await lab.complete(request)
        [prefill] = lab.prefill[0].requests
        assert prefill.sampling.temperature == pytest.approx(0.7)
        assert prefill.sampling.top_p == pytest.approx(0.95)
        assert (prefill.sampling.top_k, prefill.sampling.max_tokens, prefill.sampling.logprobs) == (-1, 6, -1)
        assert list(prefill.sampling.stop_token_ids) == [1]


async def test_text_and_chat_prompts_and_the_warning_of_a_missing_bos() -> None:
    tokenizer = ModelInfo.load(settings()).tokenizer
    async with router_lab() as lab:
        complete = await lab.generate(text="hello <｜User｜>", max_tokens=2)
        assert list(lab.prefill[0].requests[-1].token_ids) == tokenizer.encode("hello <｜User｜>")
        assert "BOS" in complete.warnings[0]
        await lab.generate(text="hello <｜User｜>", parse_special_tokens=True, add_bos=True, max_tokens=2)
        assert list(lab.prefill[0].requests[-1].token_ids) == [0, *tokenizer.encode("hello "), 3]
        chat = api.ChatInput(messages=[api.ChatMessage(role="user", content="<｜Assistant｜>")])
        complete = await lab.generate(chat=chat, max_tokens=2)
        assert list(lab.prefill[0].requests[-1].token_ids) == tokenizer.chat_ids(
            [ChatMessage("user", "<｜Assistant｜>")]
        )
        assert list(complete.warnings) == []


async def test_logprobs_come_with_every_token() -> None:
    async with router_lab() as lab:
        complete = await lab.generate(max_tokens=4, logprobs=2)
        assert [entry.token_id for entry in complete.logprobs] == list(complete.output_ids)
        assert all(len(entry.top_token_ids) == 2 for entry in complete.logprobs)
        assert not (await lab.generate(max_tokens=4)).logprobs
        assert len((await lab.generate(max_tokens=4, logprobs=0)).logprobs) == 4


@pytest.mark.parametrize("burst", [1, 3])
async def test_stop_strings_and_stop_tokens(burst: int) -> None:
    """stop-anywhere: with one token an event and with accepted runs of three."""
    tokenizer = ModelInfo.load(settings()).tokenizer
    ids = toy_generate(PROMPT, 12)
    async with router_lab(burst=burst) as lab:
        for last in range(1, 12):
            complete = await lab.generate(max_tokens=12, stop_token_ids=[ids[last]])
            end = ids.index(ids[last])
            assert list(complete.output_ids) == ids[: end + 1]
            assert (complete.finish_reason, complete.stop_reason) == ("stop", str(ids[last]))
            text = tokenizer.decode(ids[:last])
            stop = tokenizer.decode(ids)[len(text) : len(text) + 3]
            complete = await lab.generate(max_tokens=12, stop=[stop], stream=True)
            whole = tokenizer.decode(ids)
            assert complete.text == whole[: whole.index(stop)]
            assert (complete.finish_reason, complete.stop_reason) == ("stop", stop)
            assert list(complete.output_ids) == ids[: len(complete.output_ids)]
            assert stop in tokenizer.decode(complete.output_ids)
            assert stop not in tokenizer.decode(list(complete.output_ids)[:-1])


async def test_first_token_ends_it_by_length() -> None:
    """first-token-ends-it: with max_tokens 1 decode is not even asked."""
    async with router_lab() as lab:
        complete = await lab.generate(max_tokens=1, stream=True)
        assert list(complete.output_ids) == toy_generate(PROMPT, 1)
        assert complete.finish_reason == "length"
        assert not complete.HasField("handoff")
        assert complete.usage.cached_tokens == 3
        assert lab.prefill[0].requests[0].no_handoff
        await lab.assert_no_leaks()
        assert lab.decode[0].calls == []


@pytest.mark.parametrize("by", ["stop token", "stop string"])
async def test_first_token_ends_it_by_stop(by: str) -> None:
    tokenizer = ModelInfo.load(settings()).tokenizer
    first = next_token(PROMPT)
    fields = {"stop_token_ids": [first]} if by == "stop token" else {"stop": [tokenizer.decode([first])]}
    async with router_lab() as lab:
        lab.decode[0].faults.stall_at = 0
        complete = await lab.generate(max_tokens=9, stream=True, **fields)
        assert list(complete.output_ids) == [first]
        assert complete.finish_reason == "stop"
        assert complete.usage.completion_tokens == 1
        await lab.assert_no_leaks()
        assert "Release" in [name for name, _, _ in lab.decode[0].calls]


async def test_length_edges() -> None:
    """length-edges: the longest prompt works, one token more gets an error that names both numbers and no token."""
    async with router_lab() as lab:
        for length in (4094, 4095):
            complete = await lab.generate([7] * length, max_tokens=4096 - length)
            assert len(complete.output_ids) == 4096 - length
        with pytest.raises(InvalidArgument, match="the prompt has 4096 tokens; the context of 4096 tokens allows 4095"):
            await lab.generate([7] * 4096, max_tokens=1)
        with pytest.raises(InvalidArgument, match="max_tokens must be at most 1 after a prompt of 4095"):
            await lab.generate([7] * 4095, max_tokens=2)


async def test_one_giant_is_refused_and_others_go_on() -> None:
    """one-giant: a request that no decode worker can ever hold gets an error before any prefill."""
    async with router_lab(num_blocks=8) as lab:
        with pytest.raises(InvalidArgument, match="the largest decode worker's cache of 127 tokens allows 126"):
            await lab.generate([7] * 200, max_tokens=4)
        with pytest.raises(InvalidArgument, match=r"max_tokens must be at most 117 .*decode worker's cache has 127"):
            await lab.generate([7] * 10, max_tokens=118)
        assert lab.prefill[0].calls == lab.decode[0].calls == []
        assert len((await lab.generate([7] * 10, max_tokens=117)).output_ids) == 117
        complete = await lab.complete(
            api.GenerateRequest(
                tokenized=api.TokenizedInput(input_ids=[7] * 100), sampling_params=api.SamplingParams(ignore_eos=True)
            )
        )
        assert len(complete.output_ids) == 27


async def test_requests_wait_for_room_in_order() -> None:
    async with router_lab(num_blocks=16) as lab:
        results = await asyncio.gather(*(lab.generate([7 + i] * 100, max_tokens=50) for i in range(12)))
        for i, complete in enumerate(results):
            assert list(complete.output_ids) == toy_generate([7 + i] * 100, 50)


async def test_many_requests_at_once_share_one_stream() -> None:
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        prompts = [[100 + i, 7, 9] for i in range(64)]
        results = await asyncio.gather(*(lab.generate(prompt, max_tokens=20, stream=True) for prompt in prompts))
        for prompt, complete in zip(prompts, results, strict=True):
            assert list(complete.output_ids) == toy_generate(prompt, 20)
        assert {complete.handoff.decode_worker for complete in results} == {"decode-0", "decode-1"}
        assert {complete.handoff.prefill_worker for complete in results} == {"prefill-0", "prefill-1"}
        assert all(len(stub.streams) == 1 for stub in lab.decode)


async def test_placement_is_honoured() -> None:
    async with router_lab(num_prefill=3, num_decode=3) as lab:
        for i in range(3):
            wish = api.Placement(prefill_worker=f"prefill-{i}", decode_worker=f"decode-{2 - i}")
            handoff = (await lab.generate(placement=wish)).handoff
            assert (handoff.prefill_worker, handoff.decode_worker) == (f"prefill-{i}", f"decode-{2 - i}")


async def test_the_system_is_full() -> None:
    async with router_lab(settings(router={"max_running_requests": 2})) as lab:
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        running = [asyncio.create_task(lab.generate()) for _ in range(2)]
        await eventually(lambda: lab.router.num_running == 2)
        with pytest.raises(ResourceExhausted, match="at most 2 are allowed") as caught:
            await lab.generate()
        assert caught.value.retry_after_ms is not None
        gate.set()
        for task in running:
            assert list((await task).output_ids) == toy_generate(PROMPT, 8)
        assert (await lab.generate()).output_ids


async def test_doors_on_an_ipv6_address() -> None:
    async with router_lab(settings(router={"host": "::1"})) as lab:
        assert lab.grpc_address.startswith("[::1]:")
        assert list((await lab.generate()).output_ids) == toy_generate(PROMPT, 8)
        assert (await lab.http.get("/health")).status_code == 200


async def test_eos_ids_beyond_the_models_vocabulary_are_left_out(tmp_path: Path) -> None:
    """They never come, and a worker would refuse every request that names them."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model("demo"), model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4096, 2**70]}))
    async with router_lab(settings(model=str(model))) as lab:
        await lab.generate(ignore_eos=False)
        assert list(lab.prefill[0].requests[-1].sampling.stop_token_ids) == [1]


async def test_a_request_id_runs_once() -> None:
    async with router_lab() as lab:
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        running = asyncio.create_task(lab.generate(request_id="one"))
        await eventually(lambda: lab.router.num_running == 1)
        with pytest.raises(AlreadyExists, match="'one' is running"):
            await lab.generate(request_id="one")
        gate.set()
        await running
        await eventually(lambda: lab.router.num_running == 0)
        assert (await lab.generate(request_id="one")).output_ids


async def test_abort_ends_it_with_what_there_is() -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.stall_at = 3
        running = asyncio.create_task(lab.generate(request_id="x", max_tokens=50, stream=True))
        await lab.decode[0].arrived["stall"].wait()
        reply = await lab.api.Abort(api.AbortRequest(request_ids=["x", "unknown"]))
        assert list(reply.unknown_request_ids) == ["unknown"]
        complete = await running
        assert complete.finish_reason == "cancelled"
        assert list(complete.output_ids) == toy_generate(PROMPT, 50)[: len(complete.output_ids)]


@pytest.mark.parametrize("when", ["prefilling", "decoding"])
async def test_a_router_that_stops_fails_what_it_cannot_finish(when: str) -> None:
    """It is not "cancelled": the client would take half an answer for one that it had ended itself."""
    async with router_lab() as lab:
        if when == "prefilling":
            lab.prefill[0].faults.prefill_gate = asyncio.Event()
        else:
            lab.decode[0].faults.stall_at = 2
        body = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
        over_grpc = asyncio.create_task(lab.generate(max_tokens=50, stream=True))
        over_http = asyncio.create_task(lab.http.post("/v1/completions", json=body))
        stub, arrived = (lab.prefill[0], "Prefill") if when == "prefilling" else (lab.decode[0], "stall")
        await stub.arrived[arrived].wait()
        await eventually(lambda: lab.router.num_running == 2)
        await lab.router.stop(drain_s=0)
        with pytest.raises(Unavailable, match="this router is stopping"):
            await over_grpc
        assert "this router is stopping" in (await over_http).text


@pytest.mark.parametrize("when", ["prefilling", "decoding"])
async def test_a_client_that_goes_away_releases_everything(when: str) -> None:
    async with router_lab() as lab:
        if when == "prefilling":
            lab.prefill[0].faults.prefill_gate = asyncio.Event()
        else:
            lab.decode[0].faults.stall_at = 2
        call = lab.api.Generate(lab.request(max_tokens=50, stream=True))
        waiting = asyncio.create_task(call.read())
        stub, arrived = (lab.prefill[0], "Prefill") if when == "prefilling" else (lab.decode[0], "stall")
        await stub.arrived[arrived].wait()
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await lab.assert_no_leaks()
        lab.prefill[0].faults.prefill_gate = None
        assert list((await lab.generate()).output_ids) == toy_generate(PROMPT, 8)


async def test_the_request_deadline_ends_it() -> None:
    async with router_lab(settings(router={"request_timeout_ms": 300})) as lab:
        lab.decode[0].faults.stall_at = 2
        with pytest.raises(DeadlineExceeded, match=r"did not end within 0\.3 s"):
            await lab.generate(max_tokens=50)


async def test_without_workers_it_is_unavailable_at_once() -> None:
    async with router_lab(num_prefill=1, num_decode=0) as lab:
        with pytest.raises(Unavailable, match="decode: no worker is ready") as caught:
            await lab.generate()
        assert caught.value.retry_after_ms == 1_000
        assert lab.prefill[0].calls == []


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
