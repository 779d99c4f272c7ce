"""A router over real workers in processes of their own: what its clients get is what one process generates alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pd_engine.contracts import api_pb2 as api
from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.generate import Generation, generate
from pd_engine.sampling.params import SamplingParams, seed_of_choice
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import worker_processes
from support.leaks import until
from support.streams_lab import CONTEXT, WORKERS, Countdown, Lab, request, start_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "A dictionary maps keys to values, and the order of its keys is the order in which they were added. " * 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    log_dir = tmp_path_factory.mktemp("workers")
    async with worker_processes(WORKERS, log_dir, prefill=2, decode=2) as (prefill, decode):
        async for lab in start_lab(prefill, decode, log_dir):
            yield lab


PROCESSORS: dict[str, Any] = {
    "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 6,
    "logit_bias": ((12, 1.5), (300, -100.0)),
}


def params(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 3,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return SamplingParams(**(fields | changes))


def check_equal(complete: api.GenerateComplete, expected: Generation) -> None:
    """Ids, text, ends, seed, usage, logprob bits."""
    assert list(complete.output_ids) == list(expected.token_ids)
    assert complete.text == expected.text
    assert (complete.finish_reason, complete.stop_reason) == (expected.finish_reason.value, expected.stop_reason)
    assert complete.seed == expected.seed
    assert complete.usage.prompt_tokens == expected.usage.prompt_tokens
    assert complete.usage.completion_tokens == expected.usage.completion_tokens
    received = [
        (entry.logprob, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True))) for entry in complete.logprobs
    ]
    assert received == [(item.logprob, item.top) for item in expected.logprobs]


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 200])
async def test_a_stream_equals_monolithic(lab: Lab, engine: Engine, tokenizer: Tokenizer, num_tokens: int) -> None:
    """Every pair of workers, seeded, processed and with logprobs; the bytes moved are the valid slots."""
    prompt = tokenizer.encode(TEXT)[:num_tokens]
    asked = params(
        temperature=0.8, top_p=0.9, seed=num_tokens, logprobs=3, ignore_eos=False, stop_token_ids=(11,), **PROCESSORS
    )
    expected = generate(engine, tokenizer, prompt, asked, speculate=1, checksums=True)
    for prefill in ("prefill-0", "prefill-1"):
        for decode in ("decode-0", "decode-1"):
            wish = api.Placement(
                prefill_worker=prefill, decode_worker=decode, bypass_prefix_cache=True, report_block_checksums=True
            )
            complete = await lab.generate(prompt, asked, placement=wish)
            check_equal(complete, expected)
            if len(expected.token_ids) > 1:
                assert complete.handoff.bytes == num_tokens * engine.layout.bytes_per_token
                assert tuple(complete.handoff.block_checksums) == expected.prompt_checksums


async def test_same_seed_alone_and_in_company_with_and_without_speculation(
    lab: Lab, engine: Engine, tokenizer: Tokenizer
) -> None:
    """same-seed: eight at once."""
    ids = tokenizer.encode(TEXT)
    cases = [
        (
            ids[7 * number : 7 * number + 20 + 9 * number],
            params(6 + number, temperature=0.7, seed=number, speculate=number % 3),
        )
        for number in range(8)
    ]
    completes = await asyncio.gather(*(lab.generate(prompt, asked) for prompt, asked in cases))
    for complete, (prompt, asked) in zip(completes, cases, strict=True):
        check_equal(complete, generate(engine, tokenizer, prompt, asked))


@pytest.mark.parametrize("speculate", [0, 3])
async def test_stop_anywhere(lab: Lab, engine: Engine, tokenizer: Tokenizer, speculate: int) -> None:
    """stop-anywhere: stop strings and stop tokens at every place inside accepted runs, and every max_tokens."""
    prompt = tokenizer.encode(TEXT)[:30]
    whole = generate(engine, tokenizer, prompt, params(12)).token_ids
    text = tokenizer.decode(whole)
    cases = [params(n, speculate=speculate) for n in (1, 2, 3, 4, 7)]
    cases += [params(12, stop_token_ids=(token_id,), speculate=speculate) for token_id in whole[1:6]]
    cases += [params(12, stop=(text[start : start + 4],), speculate=speculate) for start in (0, 3, 8, 15, 22)]
    completes = await asyncio.gather(*(lab.generate(prompt, asked) for asked in cases))
    for complete, asked in zip(completes, cases, strict=True):
        check_equal(
            complete,
            generate(
                engine,
                tokenizer,
                prompt,
                params(asked.max_tokens, stop=asked.stop, stop_token_ids=asked.stop_token_ids),
            ),
        )


async def test_length_edges(lab: Lab, engine: Engine, tokenizer: Tokenizer) -> None:
    """length-edges: the longest prompt but one and the longest work; one token more is refused."""
    ids = tokenizer.encode(TEXT)[:CONTEXT]
    for length in (CONTEXT - 2, CONTEXT - 1):
        asked = params(CONTEXT - length)
        complete = await lab.generate(ids[:length], asked)
        check_equal(complete, generate(engine, tokenizer, ids[:length], asked, speculate=1))
    with pytest.raises(InvalidArgument, match="the prompt has 400 tokens; the context of 400 tokens allows 399"):
        await lab.generate(ids, params(1))


async def test_a_trace_says_where_a_prompt_spent_its_time(lab: Lab) -> None:
    """Chunks as the prefill worker computed them, the handoff as the decode worker saw it; bytes in its metrics."""
    ids = [token % 3000 + 7 for token in range(200)]
    complete = await lab.generate(ids, params(6), request_id="traced")
    await lab.until_idle()
    [trace] = (await lab.api.GetTraces(api.GetTracesRequest(request_id="traced"))).traces
    chunks = [span for span in trace.spans if span.name == "prefill.chunk"]
    assert len(chunks) >= 3, "chunk_tokens is 64"
    assert sum(int(span.attributes["tokens"]) for span in chunks) == 200 - complete.usage.cached_tokens
    assert all(span.ended_ms > span.begun_ms for span in chunks)
    [handoff] = [span for span in trace.spans if span.name == "handoff"]
    assert handoff.attributes["bytes"] == str(complete.handoff.bytes)
    assert {"handoff.hidden", "handoff.exposed", "decode.wait", "steps"} <= {span.name for span in trace.spans}
    lines = (await lab.http.get("/metrics")).text.splitlines()
    fetched = [float(line.split()[1]) for line in lines if line.startswith("agent_rx_bytes_total{")]
    assert sum(fetched) >= complete.handoff.bytes


async def test_clients_that_go_away_leave_nothing(lab: Lab, engine: Engine, tokenizer: Tokenizer) -> None:
    """At random moments of thirty requests; the next request is served, and every block is free at the end."""
    rng = random.Random(5)
    ids = tokenizer.encode(TEXT)

    async def go_away() -> None:
        call = lab.api.Generate(request(ids[: rng.randrange(1, 300)], params(40)))
        for _ in range(rng.randrange(0, 6)):
            await call.read()
        call.cancel()

    for _ in range(5):
        await asyncio.gather(*(go_away() for _ in range(6)))
    check_equal(await lab.generate(ids[:50], params()), generate(engine, tokenizer, ids[:50], params()))
    await lab.until_idle()


async def test_the_openai_door_gives_the_same(lab: Lab, engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT)[:40]
    body = {
        "prompt": prompt, "max_tokens": 12, "temperature": 0.6, "seed": 9, "return_token_ids": True, "stop": [" the"],
        **PROCESSORS, "logit_bias": {str(token): bias for token, bias in PROCESSORS["logit_bias"]},
    }
    asked = params(12, temperature=0.6, top_p=0.95, seed=9, ignore_eos=False, stop=(" the",), **PROCESSORS)
    expected = generate(engine, tokenizer, prompt, asked, speculate=1)
    reply = (await lab.http.post("/v1/completions", json=body)).json()
    [choice] = reply["choices"]
    assert (choice["text"], choice["token_ids"]) == (expected.text, list(expected.token_ids))
    async with lab.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text


@pytest.mark.parametrize("stream", [False, True])
async def test_many_of_one(lab: Lab, engine: Engine, tokenizer: Tokenizer, stream: bool) -> None:
    """many-of-one: two prompts and n = 3, whole and streamed: six results, six terminal states."""
    ids = tokenizer.encode(TEXT)
    prompts = [ids[:40], ids[3:21]]
    body = {"prompt": prompts, "n": 3, "max_tokens": 12, "temperature": 0.9, "top_p": 1.0, "seed": 2, "stream": stream}
    before = await lab.num_ended()
    response = await lab.http.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True})
    got: dict[int, list[int]] = defaultdict(list)
    if stream:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        replies = [json.loads(line) for line in lines[:-1]]
    else:
        replies = [response.json()]
    for choice in [choice for reply in replies for choice in reply["choices"]]:
        got[choice["index"]] += choice.get("token_ids", [])
    expected = [
        list(generate(engine, tokenizer, prompt, params(temperature=0.9, seed=seed_of_choice(2, c))).token_ids)
        for prompt in prompts
        for c in range(3)
    ]
    assert [got[index] for index in range(6)] == expected
    await lab.until_idle()
    assert await lab.num_ended() == before + 6


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_workers_that_are_killed_change_no_token(
    lab: Lab, engine: Engine, tokenizer: Tokenizer, role: str
) -> None:
    """kill -9 of one of two workers while ten streams run: all complete, all equal; it comes back and serves."""
    ids = tokenizer.encode(TEXT)
    asked_of = [
        params(120, temperature=0.7, seed=number, logprobs=0, **(PROCESSORS if number % 2 else {}))
        for number in range(10)
    ]
    cases = [(ids[number : number + 150], asked) for number, asked in enumerate(asked_of)]
    num_retries = await lab.num_retries()
    early = Countdown(30)  # of 1,200 tokens
    running = [asyncio.create_task(lab.generate(*case, on_token=early.tick)) for case in cases]
    victim = (lab.decode if role == "decode" else lab.prefill)[0]
    if role == "decode":
        await early.over.wait()
        await until(lambda: lab.num_journeys(victim) > 0 or all(one.done() for one in running))
    else:  # the first may have ended before the last one is let in
        await until(lambda: lab.router.num_running == 10 or any(one.done() for one in running))
    await victim.kill()
    completes = await asyncio.gather(*running)
    for complete, (prompt, asked) in zip(completes, cases, strict=True):
        check_equal(complete, generate(engine, tokenizer, prompt, asked, speculate=1))
    if role == "decode":  # a prefill worker may be done by then: what it handed over outlives it
        assert await lab.num_retries() > num_retries, "nothing was running there when it was killed"
    await lab.restart(victim)
    await lab.until_ready()
    wish = {f"{role}_worker": victim.worker_id}
    complete = await lab.generate(*cases[0], placement=api.Placement(**wish))
    check_equal(complete, generate(engine, tokenizer, *cases[0], speculate=1))


@pytest.mark.parametrize(
    ("num_waves", "num_streams"),
    [(4, 5), pytest.param(20, 10, marks=[pytest.mark.slow, pytest.mark.timeout(1_200)])],
)
async def test_kill_9_at_random_moments(
    lab: Lab, engine: Engine, tokenizer: Tokenizer, num_waves: int, num_streams: int
) -> None:
    """A worker of either kind is killed in each wave of streams, at the token that a die chose: all complete, all
    equal. It is back before the next wave."""
    rng = random.Random(num_waves)
    ids = tokenizer.encode(TEXT)
    roles = ["prefill", "decode"] * (num_waves // 2)
    rng.shuffle(roles)
    num_retries = await lab.num_retries()
    for wave, role in enumerate(roles):
        cases = [
            (
                ids[(start := rng.randrange(200)) : start + rng.randrange(20, 250)],
                params(32, temperature=rng.choice((0.0, 0.8)), seed=100 * wave + number, logprobs=0,
                       speculate=rng.choice((0, 1, 2))),
            )
            for number in range(num_streams)
        ]
        victim = rng.choice(lab.prefill if role == "prefill" else lab.decode)
        moment = Countdown(rng.randrange(num_streams if role == "prefill" else 12 * num_streams))
        running = [
            asyncio.create_task(lab.generate(prompt, asked, on_token=moment.tick)) for prompt, asked in cases
        ]
        await moment.over.wait()
        if role == "decode":
            await until(lambda: lab.num_journeys(victim) > 0 or all(one.done() for one in running))  # noqa: B023
        await victim.kill()
        completes = await asyncio.gather(*running)
        expected, _ = await asyncio.gather(
            asyncio.to_thread(lambda cases=cases: [generate(engine, tokenizer, *case) for case in cases]),
            lab.restart(victim),
        )
        for complete, generation in zip(completes, expected, strict=True):
            check_equal(complete, generation)
        await lab.until_ready()
    assert await lab.num_retries() > num_retries, "nothing was running where it was killed"
