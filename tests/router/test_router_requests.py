"""Requests through a router over stub workers: what the client gets, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from pd_engine.contracts import api_pb2 as api
from pd_engine.errors import (
    InvalidArgument,
    ResourceExhausted,
)
from pd_engine.model.checkpoint import resolve_model
from pd_engine.sampling.params import seed_from_request_id
from pd_engine.text.chat import ChatMessage
from pd_router.model_info import ModelInfo
from support.router_lab import PROMPT, eventually, router_lab, settings
from support.toy_model import next_token, toy_generate


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
            min_p=0.125,
            repetition_penalty=1.25,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={8: -100.0, 6: 3.5},
            min_tokens=1,
            stop_token_ids=[9],
            request_id="r",
            cache_salt="s",
            priority=-3,
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
        assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.125, 1.25, 1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
        assert dict(sampling.logit_bias) == {6: 3.5, 8: -100.0}
        assert reserve.report_block_checksums
        assert not reserve.bypass_prefix_cache
        assert reserve.cache_salt == prefill.cache_salt == "s"
        assert reserve.priority == prefill.priority == -3
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
        assert (prefill.sampling.min_p, prefill.sampling.repetition_penalty, prefill.sampling.min_tokens) == (0, 1, 0)
        assert (prefill.sampling.presence_penalty, prefill.sampling.frequency_penalty) == (0, 0)
        assert not prefill.sampling.logit_bias


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
    async with router_lab(settings(router={"max_running_requests": 2, "max_waiting_requests": 0})) as lab:
        lab.prefill[0].faults.prefill_gate = gate = asyncio.Event()
        running = [asyncio.create_task(lab.generate()) for _ in range(2)]
        await eventually(lambda: lab.router.num_running == 2)
        said = "2 requests are running, 0 wait; at most 2 are allowed at once, and 0 may wait"
        with pytest.raises(ResourceExhausted, match=said) as caught:
            await lab.generate()
        assert caught.value.retry_after_ms is not None
        gate.set()
        for task in running:
            assert list((await task).output_ids) == toy_generate(PROMPT, 8)
        await eventually(lambda: lab.router.num_running == 0)
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
