"""FP8 weights and latents between worker processes: what one process gives, in 656-byte slots of their own size; and
workers of which only one keeps its latents in FP8 do not hand over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pd_engine.engine import Engine
from pd_engine.generate import generate
from pd_engine.sampling.params import SamplingParams
from pd_engine.settings import EngineSettings
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import SECRET, ProcessWorker, start_process
from support.engine_cases import random_ids
from support.engine_fp8 import write_fp8_checkpoint
from support.player import Player, sampling_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE: dict[str, Any] = {"cache_mib": 8, "chunk_tokens": 32}
FP8_ENGINE = ENGINE | {"latent_dtype": "fp8"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, ProcessWorker]]:
    """A prefill worker with FP8 latents, and two decode workers: one with, one without."""
    log_dir = tmp_path_factory.mktemp("workers")
    engines = {"prefill-fp8": FP8_ENGINE, "decode-fp8": FP8_ENGINE, "decode-bf16": ENGINE}
    starts = [
        start_process(
            worker_id.partition("-")[0], worker_id,
            {"model": str(model), "engine": engine, "decode": {"adaptive_speculation": False}}, log_dir,
        ) for worker_id, engine in engines.items()
    ]
    started = await asyncio.gather(*starts)
    yield {worker.worker_id: worker for worker in started}
    await asyncio.gather(*(worker.kill() for worker in started))


def params(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=1.0, top_k=-1, seed=seed, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("num_tokens", [1, 17, 70])
async def test_tokens_logprobs_checksums_and_bytes_equal_monolithic(
    workers: dict[str, ProcessWorker], model: Path, num_tokens: int
) -> None:
    engine = Engine.load(model, EngineSettings(**FP8_ENGINE), max_speculate=2)
    tokenizer = Tokenizer.load(model)
    ids, asked = random_ids(engine.config.vocab_size, num_tokens, seed=num_tokens), params(num_tokens)
    player = Player(workers["prefill-fp8"].address, workers["decode-fp8"].address, SECRET)
    await player.open()
    copy = await player.run(ids, sampling_message(asked, tokenizer.eos_token_ids, 2))
    expected = generate(engine, tokenizer, ids, asked, speculate=2, checksums=True)
    assert copy.failure is None
    assert copy.token_ids == list(expected.token_ids)
    received = [copy.logprobs[index] for index in sorted(copy.logprobs)]
    assert received == [(item.logprob, item.top) for item in expected.logprobs]
    assert copy.handoff is not None
    assert tuple(copy.handoff.block_checksums) == expected.prompt_checksums
    assert copy.handoff.bytes == num_tokens * 3 * (128 + 4 + 16)
    await player.until_idle()
    await player.close()


async def test_a_worker_with_other_latents_is_refused(workers: dict[str, ProcessWorker], model: Path) -> None:
    player = Player(workers["prefill-fp8"].address, workers["decode-bf16"].address, SECRET)
    await player.open()
    copy = await player.run(random_ids(320, 20), sampling_message(params(1), Tokenizer.load(model).eos_token_ids, 0))
    assert copy.failure is not None
    assert "layout version is 2 at prefill-fp8 (source) and 1 at decode-bf16" in copy.failure.message
    await player.until_idle()
    await player.close()
