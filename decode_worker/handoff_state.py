"""What a handoff brought: a sequence to go on with, a report to the router, or a failure."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.lease import PullResult
from kv_transfer.manifest import Closing, HiddenState
from pd_engine.cache.arena import TORCH_DTYPES
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.errors import Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, InvalidArgument, PdRelayError
from pd_engine.sequence import Sequence
from pd_engine.service.requests import Choice


def handed_over(
    engine: Engine, name: str, choice: Choice, closing: Closing, block_ids: list[int], *, num_mtp_tokens: int
) -> Sequence:
    """The sequence after its first token: all P prompt positions computed, one token sampled.

    Args:
        num_mtp_tokens: leading positions whose MTP slots are final; it does not draft where these are not all.

    Raises:
        FailedPrecondition: the source's MTP state is missing or is not of this model's shape.
    """
    num_computed, first_token_id = len(choice.token_ids), closing.first_token_id
    assert first_token_id is not None, f"{name}: a prefix is no prompt"
    return Sequence(
        name=name,
        token_ids=[*choice.token_ids, first_token_id],
        num_prompt_tokens=choice.num_prompt_tokens,
        params=choice.params,
        ending_ids=choice.ending_ids,
        speculate=choice.speculate if engine.has_mtp else 0,
        block_ids=block_ids,
        num_computed=num_computed,
        num_computed_mtp=num_mtp_tokens,
        pending_hidden=_pending_hidden(engine, closing.hidden) if engine.has_mtp else None,
    )


def check_tokens(closing: Closing, vocab_size: int) -> None:
    """Raises:
    DataLoss: a token that the source names is none of the vocabulary.
    """
    top = () if closing.logprobs is None else closing.logprobs.top
    named = [closing.first_token_id or 0, *(token_id for token_id, _ in top)]
    if max(named) >= vocab_size:
        raise DataLoss(f"the source names token {max(named)}; the vocabulary has {vocab_size}")


def handoff_message(result: PullResult, with_checksums: bool) -> pb.HandoffDone:
    checksums = [int(value) for value in result.checksums.reshape(-1)] if with_checksums else []
    return pb.HandoffDone(
        bytes=result.num_bytes, transport=result.transport, block_checksums=checksums,
        hidden_bytes=result.num_hidden_bytes, cached_tokens=result.closing.num_cached_tokens,
        pull_ms=result.pull_s * 1000, exposed_ms=result.exposed_s * 1000,
    )


def is_worth_another_try(error: PdRelayError) -> bool:
    """Whether the router should place the journey again after this failure of its handoff: a peer that did not answer
    in time, called it off or said what cannot be is a reason for that, although it would not be in answer to a request.
    Workers that cannot hand over at all (`FailedPrecondition`) are to be seen."""
    return error.retryable or isinstance(error, (DeadlineExceeded, Cancelled, InvalidArgument))


def _pending_hidden(engine: Engine, hidden: HiddenState | None) -> Tensor:
    """[1, D] in the engine's dtype, where it computes."""
    if hidden is None:
        raise FailedPrecondition("the source sent no MTP state, and this worker drafts with MTP: start both alike")
    width = engine.config.hidden_size
    dtype = TORCH_DTYPES[engine.dtype]
    if (hidden.dtype, hidden.width, len(hidden.data)) != (engine.dtype, width, width * dtype.itemsize):
        raise FailedPrecondition(
            f"the source's MTP state is {hidden.width} x {hidden.dtype} ({len(hidden.data)} bytes); this worker needs "
            f"{width} x {engine.dtype}"
        )
    return torch.frombuffer(bytearray(hidden.data), dtype=dtype).view(1, width).to(engine.ops.device)
