"""What workers say is checked before anything is made of it. Pure.

A worker that says what cannot be is faulty, whatever the reason: what it said is dropped as `DataLoss`, the attempt
fails or the worker counts as lost, and another one takes over. A client never sees it, nor gets the blame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DataLoss, InvalidArgument
from pd_engine.service.prompt_times import MAX_CHUNKS
from pd_engine.service.requests import MAX_LEASE_MS, parse_address, parse_hex_id

MAX_TRANSPORT_CHARS = 32
RATES = ("prefill_tokens_per_s", "itl_ms", "pull_bytes_per_s", "watched_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyBounds:
    """Of the replies about one attempt. Every check raises DataLoss.

    Attributes:
        vocab_size: token ids are below it.
        num_tokens: prompt and emitted ones, that it begins with.
        block_size: tokens a block.
        num_top: most likely tokens that were asked for with each token; None: no logprobs were.
    """

    vocab_size: int
    num_tokens: int
    block_size: int
    num_top: int | None

    def check_lease(self, lease: pb.ReserveReply) -> None:
        _check_hex("lease_id", lease.lease_id)
        _require(1 <= lease.lease_ms <= MAX_LEASE_MS, "lease_ms", lease.lease_ms)
        _require(lease.num_held_blocks <= self.num_tokens // self.block_size, "num_held_blocks", lease.num_held_blocks)

    def check_source(self, source: pb.SourceInfo, epoch: str) -> None:
        """`epoch`: of the worker that says so: it can only be the source itself."""
        _require(source.epoch == epoch, "the source's epoch", source.epoch)
        _check_hex("the source's token", source.token)
        try:
            parse_address("the source's address", source.address)
        except InvalidArgument as error:
            raise DataLoss(error.message) from None

    def check_first_token(self, first: pb.FirstToken) -> None:
        """But for its token, which `check_tokens` looks at."""
        self._check_cached(first.cached_tokens)
        check_times(first.times)

    def check_event(self, event: pb.TokensEvent) -> None:
        """But for its tokens, as above."""
        if event.accepted_tokens > event.drafted_tokens:
            raise DataLoss(f"{event.accepted_tokens} of {event.drafted_tokens} drafts cannot have been accepted")
        if event.HasField("handoff"):
            handoff = event.handoff
            self._check_cached(handoff.cached_tokens)
            _require(handoff.hidden_bytes <= handoff.bytes, "hidden_bytes", handoff.hidden_bytes)
            _require(len(handoff.transport) <= MAX_TRANSPORT_CHARS, "transport", handoff.transport)
            _check_durations((handoff.pull_ms, handoff.exposed_ms))
        if event.HasField("local_prefill"):
            self._check_cached(event.local_prefill.cached_tokens)
            check_times(event.local_prefill.times)

    def check_tokens(self, token_ids: Sequence[int], logprobs: Sequence[pb.Logprobs]) -> None:
        """Of the vocabulary, each with as many logprobs as were asked for."""
        if max(token_ids, default=0) >= self.vocab_size:
            raise DataLoss(f"token {max(token_ids)} is none of the vocabulary, which has {self.vocab_size}")
        if self.num_top is None and not logprobs:  # nearly always
            return
        expected = 0 if self.num_top is None else len(token_ids)
        if len(logprobs) != expected:
            raise DataLoss(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs, where {expected} were wanted")
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            self._check_logprobs(token_id, entry)

    def _check_logprobs(self, token_id: int, entry: pb.Logprobs) -> None:
        num_top = len(entry.top_token_ids)
        if entry.token_id != token_id:
            raise DataLoss(f"token {token_id} came with the logprob of token {entry.token_id}")
        if num_top != len(entry.top_logprobs) or num_top > (self.num_top or 0):
            raise DataLoss(f"{num_top} top tokens came with {len(entry.top_logprobs)} logprobs, not {self.num_top}")
        if max(entry.top_token_ids, default=0) >= self.vocab_size:
            raise DataLoss(f"token {max(entry.top_token_ids)} is none of the vocabulary, which has {self.vocab_size}")
        for value in (entry.logprob, *entry.top_logprobs):
            if not value < math.inf:  # nor a number at all
                raise DataLoss(f"token {token_id} came with a logprob of {value}")

    def _check_cached(self, num_cached_tokens: int) -> None:
        _require(num_cached_tokens <= self.num_tokens, "cached_tokens", num_cached_tokens)


def check_info(info: pb.WorkerInfo) -> None:
    """Raises:
    DataLoss: what everything is counted in cannot be.
    """
    _check_hex("epoch", info.epoch)
    for field in ("block_size", "num_blocks_total", "max_context_length"):
        _require(getattr(info, field) >= 1, field, getattr(info, field))
    _require(info.lifeline_port < 65_536, "lifeline_port", info.lifeline_port)


def check_loads(loads: pb.LoadsReply) -> None:
    """Raises:
    DataLoss: numbers that placement reckons with are none, or contradict each other.
    """
    for field in RATES:
        value = getattr(loads, field)
        _require(0 <= value < math.inf, field, value)
    for time in loads.stages:
        _require(0 <= time.seconds < math.inf, "the seconds of a stage", time.seconds)
    _require(loads.num_blocks_free <= loads.num_blocks_total, "num_blocks_free", loads.num_blocks_free)


def check_times(times: pb.PromptTimes) -> None:
    """Raises:
    DataLoss: they are none, or too many.
    """
    _require(len(times.chunks) <= MAX_CHUNKS, "the number of chunks", len(times.chunks))
    _check_durations((times.total_ms, times.queue_ms, times.fetch_ms))
    _check_durations(value for chunk in times.chunks for value in (chunk.begun_ms, chunk.ms))


def _check_durations(values: Iterable[float]) -> None:
    """They may be a little below 0: a worker takes the difference of two clocks."""
    for value in values:
        _require(math.isfinite(value), "a duration", value)


def _check_hex(field: str, value: str) -> None:
    try:
        parse_hex_id(field, value)
    except InvalidArgument as error:
        raise DataLoss(error.message) from None


def _require(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise DataLoss(f"{what} cannot be {str(value)[:64]!r}")
