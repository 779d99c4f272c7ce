"""From rows of logits to tokens: position-keyed sampling, and logprobs where they were asked for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_engine.sampling.processor import NO_CHANGE, LogitProcessor, join, process
from pd_engine.sequence import Sequence, TokenLogprobs
from pd_kernels.ops import Ops, SamplingRows


class Place(NamedTuple):
    """What a row of logits is for: the token after those that a sequence has, and after `drafted` ones."""

    sequence: Sequence
    drafted: Seq[int] = ()

    @property
    def position(self) -> int:
        return self.sequence.num_tokens + len(self.drafted)


def sample_rows(ops: Ops, logits_TZ: Tensor, places: Seq[Place]) -> list[int]:
    """The token of each row. It depends on the logits, the tokens before it and its position, which keys the noise: the
    same token comes out whether the row drafts, verifies, continues a stream or replays it. `logits_TZ` is not changed.
    """
    params = [place.sequence.params for place in places]
    rows = SamplingRows(
        temperature_T=np.array([p.temperature for p in params], dtype=np.float32),
        top_k_T=np.array([p.top_k for p in params], dtype=np.int32),
        top_p_T=np.array([p.top_p for p in params], dtype=np.float32),
        min_p_T=np.array([p.min_p for p in params], dtype=np.float32),
        seed_T=np.array([p.seed for p in params], dtype=np.uint64),
        position_T=np.array([place.position for place in places], dtype=np.int64),
    )
    if any(p.changes_logits for p in params):
        logits_TZ = _processed(logits_TZ, places)
    return [int(token) for token in ops.sample(logits_TZ, rows)]


def _processed(logits_TZ: Tensor, places: Seq[Place]) -> Tensor:
    """The logits, in a copy where something is done to those of one row at least."""
    tables = [
        _processor(place.sequence).table(place.drafted) if place.sequence.params.changes_logits else NO_CHANGE
        for place in places
    ]
    table = join(tables)
    if not len(table):
        return logits_TZ
    rows = np.repeat(np.arange(len(places)), [len(table) for table in tables])
    indices = torch.from_numpy(rows * logits_TZ.shape[1] + table["id"]).to(logits_TZ.device)
    processed_TZ = logits_TZ.clone()
    flat = processed_TZ.view(-1)
    flat[indices] = torch.from_numpy(process(flat[indices].cpu().numpy(), table)).to(logits_TZ.device)
    return processed_TZ


def _processor(sequence: Sequence) -> LogitProcessor:
    """The sequence's own, made at its first token, up to its last one."""
    if sequence.processor is None:
        sequence.processor = LogitProcessor(
            sequence.params, ending_ids=sequence.ending_ids,
            prompt_ids=sequence.token_ids[: sequence.num_prompt_tokens],
        )
    sequence.processor.follow(sequence.token_ids)
    return sequence.processor


def token_logprobs(
    ops: Ops, logits_TZ: Tensor, token_ids: Seq[int], num_tops: Seq[int | None]
) -> list[TokenLogprobs | None]:
    """Logprobs of the sampled tokens; None for rows whose `num_tops` is None."""
    wanted = [row for row, num_top in enumerate(num_tops) if num_top is not None]
    result: list[TokenLogprobs | None] = [None] * len(num_tops)
    if wanted:
        for row, logprobs_Z in zip(wanted, ops.logprobs(logits_TZ[wanted].contiguous()), strict=True):
            num_top = num_tops[row]
            assert num_top is not None
            result[row] = TokenLogprobs(logprob=float(logprobs_Z[token_ids[row]]), top=_top(logprobs_Z, num_top))
    return result


def _top(logprobs_Z: npt.NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` largest as (token id, logprob), best first, ties to the lowest id. NaN counts as the smallest."""
    count = min(count, len(logprobs_Z))
    if count == 0:
        return ()
    values = np.where(np.isnan(logprobs_Z), np.float32(-np.inf), logprobs_Z)
    threshold = np.partition(values, -count)[-count]
    candidates = np.flatnonzero(values >= threshold)
    best = candidates[np.argsort(-values[candidates], kind="stable")][:count]
    return tuple((int(token), float(logprobs_Z[token])) for token in best)
