"""`pd-relay submit` as a user runs it, against a router over stub workers."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument
from pd_ops.client import checked_address
from pd_ops.request_options import parse_token_ids, read_prompt
from pd_ops.results import interrupted_document, tokens_event
from support.commands import COMMAND, environment
from support.proxy import Proxy
from support.router_lab import PROMPT, RouterLab, router_lab
from support.toy_model import toy_generate

TOKENS = ("--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", "4", "--temperature", "0", "--ignore-eos")


async def submit(lab: RouterLab, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND, "submit", "--address", lab.grpc_address, "--json", *TOKENS, *arguments,
        stdout=PIPE, stderr=PIPE, env=environment(),
    )


async def finished(process: Process) -> tuple[int | None, list[dict[str, Any]], str]:
    stdout, stderr = await process.communicate()
    return process.returncode, [json.loads(line) for line in stdout.splitlines()], stderr.decode()


async def test_the_dtype_that_a_cluster_must_serve() -> None:
    async with router_lab() as lab:
        for dtype in ("bf16", "auto"):
            code, [document], stderr = await finished(await submit(lab, "--dtype", dtype))
            assert code == 0, stderr
            assert document["token_ids"] == toy_generate(PROMPT, 4)
        code, [document], stderr = await finished(await submit(lab, "--dtype", "fp32"))
        assert code == 2
        assert document["error"]["code"] == "failed_precondition"
        assert f"--dtype is fp32, but the cluster at {lab.grpc_address} serves bf16;" in stderr
        code, [document], stderr = await finished(await submit(lab, "--dtype", "fp8"))
        assert (code, stderr) == (2, "error: --dtype must be one of auto, bf16, fp16, fp32, got 'fp8'\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_stream_says_what_had_come(number: signal.Signals) -> None:
    async with router_lab() as lab:
        lab.decode[0].faults.stall_at = 3
        process = await submit(lab, "--stream", "--logprobs", "1")
        assert process.stdout is not None
        given: list[dict[str, Any]] = []
        while sum(len(event["token_ids"]) for event in given) < 3:
            given.append(json.loads(await process.stdout.readline()))
        process.send_signal(number)
        code, [last], stderr = await finished(process)
        assert code == 130
        assert last == {
            "event": "interrupted", "interrupted": True, "finish_reason": "cancelled",
            "token_ids": toy_generate(PROMPT, 3), "text": "".join(event["text"] for event in given),
            "logprobs": [one for event in given for one in event["logprobs"]],
        }
        assert stderr == "[interrupted]\n"


async def test_a_lost_connection_is_told_in_words() -> None:
    async with router_lab() as lab, Proxy(lab.grpc_address) as proxy:
        lab.decode[0].faults.stall_at = 3
        process = await submit(lab, "--stream", "--address", proxy.address)
        assert process.stdout is not None
        assert json.loads(await process.stdout.readline())["event"] == "tokens"
        proxy.cut()
        code, documents, stderr = await finished(process)
        assert code == 3
        assert f"the connection to the router at {proxy.address} was lost" in documents[-1]["error"]["message"]
        assert "was lost" in stderr


async def test_an_interrupted_answer_of_which_nothing_had_come() -> None:
    async with router_lab() as lab:
        gate = lab.prefill[0].faults.prefill_gate = asyncio.Event()
        process = await submit(lab)
        async with asyncio.timeout(60):
            while not lab.router.num_running:  # noqa: ASYNC110 - another process's call
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        code, documents, _ = await finished(process)
        gate.set()
        assert code == 130
        assert documents == [
            {"interrupted": True, "token_ids": [], "text": "", "finish_reason": "cancelled", "logprobs": None}
        ]


def test_what_had_come_is_put_together() -> None:
    first = {"token_id": 7, "logprob": -0.5, "top": []}
    events = [
        tokens_event(index=0, token_ids=[7], text="a", logprobs=[first]),
        tokens_event(index=1, token_ids=[8, 9], text="bc", logprobs=None),
    ]
    assert interrupted_document(iter(events)) == {
        "interrupted": True, "token_ids": [7, 8, 9], "text": "abc", "finish_reason": "cancelled", "logprobs": [first],
    }


@pytest.mark.parametrize("number", ["9" * 5000, "4294967296", "1e3", "-1", "\u0663", ""])
def test_numbers_that_are_no_token_ids(number: str) -> None:
    with pytest.raises(InvalidArgument, match="--token-ids must be numbers") as caught:
        parse_token_ids(f"1,{number},2")
    assert len(caught.value.message) < 200


def test_leading_zeros_of_token_ids() -> None:
    assert parse_token_ids("0007,0," + "0" * 5000 + "12") == (7, 0, 12)


@pytest.mark.parametrize("port", ["9" * 5000, "65536", "0", "-1", "", "\u0663"])
def test_ports_that_are_none(port: str) -> None:
    with pytest.raises(InvalidArgument, match="an address is HOST:PORT"):
        checked_address(f"host:{port}")


def test_a_prompt_file_that_never_ends() -> None:
    with pytest.raises(InvalidArgument, match="the prompt in /dev/zero is larger than 16777216 bytes"):
        read_prompt(
            prompt=None, prompt_file=Path("/dev/zero"), token_ids=None, chat=False, add_bos=None, parse_special=False
        )
