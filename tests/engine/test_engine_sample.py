"""Logprobs of sampled tokens: their order, ties and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd_engine.model.checkpoint import DEMO_PATH
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.sample import token_logprobs
from pd_engine.steps.state import last_hidden
from pd_kernels.backend import load_ops
from support.engine_cases import available_ops, load_engine, new_sequence, random_ids, release


@pytest.fixture(scope="module", params=available_ops())
def ops(request: pytest.FixtureRequest) -> object:
    return load_ops(request.param, threads=1)


def test_tops_are_the_most_likely_best_first(ops: object) -> None:
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(0))
    want = torch.log_softmax(logits.double(), dim=-1)
    result = token_logprobs(ops, logits, [7, 8, 9, 10, 11], [0, None, 4, 301, 1000])
    assert result[1] is None
    for row, count in ((0, 0), (2, 4), (3, 301), (4, 301)):
        item = result[row]
        assert item is not None
        order = torch.argsort(want[row], descending=True)[:count].tolist()
        assert [token for token, _ in item.top] == order
        assert [value for _, value in item.top] == pytest.approx(want[row][order].tolist(), abs=1e-5)
        assert item.logprob == pytest.approx(float(want[row, 7 + row]), abs=1e-5)
        assert float(np.float32(item.logprob)) == item.logprob  # float32 values


def test_ties_go_to_the_lowest_id(ops: object) -> None:
    logits = torch.zeros(1, 50)
    logits[0, [3, 40, 41]] = 2.0
    [item] = token_logprobs(ops, logits, [41], [5])
    assert item is not None
    assert [token for token, _ in item.top] == [3, 40, 41, 0, 1]
    assert item.logprob == item.top[0][1]


def test_the_sampled_token_need_not_be_among_the_tops() -> None:
    """Its logprob is of the unprocessed distribution, whatever temperature and top-p did."""
    engine = load_engine(DEMO_PATH, dtype="auto", cache_mib=2)
    ids = [0, *random_ids(4096, 9)]
    sequence = new_sequence(engine, ids, temperature=5.0, seed=3, logprobs=2, max_tokens=2)
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=10)])
    want = torch.log_softmax(engine.main.logits(last_hidden(sequence))[0].double(), dim=-1)
    [token] = sample_first(engine, [sequence])
    release(engine, sequence)
    assert token.logprobs is not None
    assert token.token_id not in [other for other, _ in token.logprobs.top]
    assert token.logprobs.logprob == pytest.approx(float(want[token.token_id]), abs=1e-5)
    assert token.logprobs.top[0] == (int(want.argmax()), pytest.approx(float(want.max()), abs=1e-5))
