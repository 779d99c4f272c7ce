"""The real `openai` client against the HTTP door, and the calls beside OpenAI's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from pd_engine.sampling.params import seed_of_choice
from pd_engine.text.chat import ChatMessage
from pd_router.model_info import ModelInfo
from support.router_lab import PROMPT, RouterLab, router_lab, settings
from support.toy_model import toy_generate

TOKENIZER = ModelInfo.load(settings()).tokenizer
TURNS: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence."},
    {"role": "user", "content": "And a tuple?"},
]
CHAT_IDS = TOKENIZER.chat_ids([ChatMessage(turn["role"], turn["content"]) for turn in TURNS])
OURS: Any = {"ignore_eos": True}


@asynccontextmanager
async def client_of(lab: RouterLab) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{lab.http.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def test_a_conversation() -> None:
    """Of several turns, with logprobs, whole and streamed."""
    answer = toy_generate(CHAT_IDS, 8)
    async with router_lab() as lab, client_of(lab) as client:
        whole = await client.chat.completions.create(
            model="demo", messages=TURNS, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2,
            extra_body=OURS,
        )
        [choice] = whole.choices
        assert choice.message.content == TOKENIZER.decode(answer)
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 8
        data = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert data.decode() == choice.message.content
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(CHAT_IDS), 8)

        stream = await client.chat.completions.create(
            model="demo", messages=TURNS, max_completion_tokens=8, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body=OURS,
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TOKENIZER.decode(answer)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == whole.usage
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_an_answer_is_sent_back_as_it_came() -> None:
    """As the client's own object, or as all of its fields, most of them null; the prompt is the same."""
    async with router_lab() as lab, client_of(lab) as client:
        first = await client.chat.completions.create(model="demo", messages=TURNS, max_tokens=4, extra_body=OURS)
        message = first.choices[0].message
        sizes = set()
        for answer in (message, message.model_dump(), {"role": "assistant", "content": message.content}):
            turns: Any = [*TURNS, answer, {"role": "user", "content": "Go on."}]
            reply = await client.chat.completions.create(model="demo", messages=turns, max_tokens=1, extra_body=OURS)
            assert reply.usage is not None
            sizes.add(reply.usage.prompt_tokens)
        assert len(sizes) == 1


async def test_usage_in_every_chunk() -> None:
    """As guidellm asks for it, and `obfuscation` left out, as proxies do."""
    async with router_lab() as lab, client_of(lab) as client:
        options: Any = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
        for n in (1, 2):
            stream = await client.completions.create(
                model="demo", prompt=PROMPT, n=n, max_tokens=8, seed=5, stream=True, stream_options=options,
                extra_body={**OURS, "return_token_ids": True},
            )
            num_seen = 0
            async for chunk in stream:
                num_seen += sum(len(choice.model_dump().get("token_ids") or ()) for choice in chunk.choices)
                assert chunk.usage is not None
                assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (len(PROMPT), num_seen)
                assert chunk.usage.total_tokens == len(PROMPT) + num_seen
            assert num_seen == 8 * n


async def test_completions_of_several_prompts_and_choices() -> None:
    async with router_lab() as lab, client_of(lab) as client:
        answers = [toy_generate(PROMPT, 8, seed_of_choice(5, choice)) for choice in range(2)]
        whole = await client.completions.create(
            model="demo", prompt=[PROMPT, PROMPT], n=2, max_tokens=8, temperature=1, seed=5, logprobs=1, extra_body=OURS
        )
        assert [choice.text for choice in whole.choices] == [TOKENIZER.decode(ids) for ids in answers * 2]
        assert whole.choices[3].logprobs is not None
        assert len(whole.choices[3].logprobs.tokens or ()) == 8
        stream = await client.completions.create(
            model="demo", prompt=PROMPT, n=2, max_tokens=8, temperature=1, seed=5, stream=True, extra_body=OURS
        )
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [TOKENIZER.decode(ids) for ids in answers]


async def test_errors_have_the_clients_own_types() -> None:
    async with router_lab() as lab, client_of(lab) as client:
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            await client.chat.completions.create(model="other", messages=TURNS)
        with pytest.raises(openai.BadRequestError, match="temperature must be"):
            await client.chat.completions.create(model="demo", messages=TURNS, temperature=-1)
        assert [model.id for model in (await client.models.list()).data] == ["demo"]
        assert await client.models.retrieve("demo") == (await client.models.list()).data[0]
        with pytest.raises(openai.NotFoundError, match="'other/model' is not served here"):
            await client.models.retrieve("other/model")


async def test_tokenize_and_back() -> None:
    async with router_lab() as lab:
        text = "naïve <｜User｜> text"
        reply = (await lab.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert reply["tokens"] == TOKENIZER.encode(text)
        assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 4096)
        assert len(reply["token_strs"]) == reply["count"]
        assert (await lab.http.post("/detokenize", json={"tokens": reply["tokens"]})).json() == {"prompt": text}
        reply = (await lab.http.post("/tokenize", json={"messages": TURNS, "model": "demo"})).json()
        assert (reply["tokens"], reply["token_strs"]) == (CHAT_IDS, None)
        for path, body, message in (
            ("/tokenize", {}, "prompt or messages is needed, one of them"),
            ("/tokenize", {"prompt": "a", "messages": TURNS}, "prompt or messages is needed, one of them"),
            ("/tokenize", {"prompt": ""}, "the prompt must not be empty"),
            ("/tokenize", {"prompt": "a", "nothing": 1}, "unknown field nothing"),
            ("/detokenize", {"tokens": [4096]}, "tokens must be in [0, 4096), got 4096"),
            ("/detokenize", {"tokens": [-1]}, "tokens must be in"),
            ("/detokenize", {"tokens": "a"}, "tokens: Input should be a valid list"),
            ("/detokenize", {}, "tokens is missing"),
        ):
            response = await lab.http.post(path, json=body)
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
        assert (await lab.http.post("/tokenize", json={"prompt": "a", "model": "b"})).status_code == 404
