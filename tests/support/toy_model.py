"""The model of stub workers: its next token is a hash of all tokens before it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from pd_engine.contracts import worker_pb2 as pb

VOCAB_SIZE = 4096
FIRST_ID = 5  # of the demo vocabulary that is not special


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """`seed`: 0 for a greedy request."""
    return FIRST_ID + zlib.crc32(array("I", token_ids).tobytes(), seed % 2**32) % (VOCAB_SIZE - FIRST_ID)


def toy_generate(prompt_ids: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What one machine would answer, without stop tokens."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(next_token(ids, seed))
    return ids[len(prompt_ids) :]


def toy_seed(sampling: pb.Sampling) -> int:
    """Of `next_token`."""
    return sampling.seed if sampling.temperature else 0


def toy_logprobs(token_id: int, num_top: int) -> pb.Logprobs:
    tops = [(token_id + i) % VOCAB_SIZE for i in range(num_top)]
    return pb.Logprobs(
        token_id=token_id, logprob=-0.5, top_token_ids=tops, top_logprobs=[-0.5 - i for i in range(num_top)]
    )
