"""A worker as placement sees it, made from what its link knows. Speeds that nobody measured are the pool's best."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pd_engine.contracts import worker_pb2 as pb
from pd_router.costs import assumed_itl_ms
from pd_router.link import WorkerLink
from pd_router.pools import DEFAULT_MOVE_MS_PER_TOKEN, DEFAULT_PREFILL_MS_PER_TOKEN, WorkerView


def prefill_view(link: WorkerLink, pool: Iterable[WorkerLink]) -> WorkerView:
    """`pool`: all workers of the role. One that has not been measured counts as fast as the fastest, or nobody would
    ever find out."""
    load = link.load
    num_blocks = link.info.num_blocks_total if link.info is not None else 0
    ms_per_token = load.prefill_ms_per_token
    if ms_per_token is None:
        measured = (other.load.prefill_ms_per_token for other in pool)
        ms_per_token = min((ms for ms in measured if ms is not None), default=DEFAULT_PREFILL_MS_PER_TOKEN)
    return WorkerView(
        worker_id=link.worker_id,
        ready=link.takes_work,
        expected=link.endpoint.is_expected,
        has_room=load.has_room,
        num_queued_tokens=load.num_queued_tokens,
        num_blocks_free=num_blocks,
        num_blocks_total=num_blocks,
        prefill_ms_per_token=ms_per_token,
        move_ms_per_token=_move_ms_per_token(link, pool),
    )


def decode_view(link: WorkerLink, pool: Iterable[WorkerLink], *, prefill: Iterable[WorkerLink]) -> WorkerView:
    """`pool` as for prefill; `prefill`: that pool. Who has computed no prompt counts as fast as the fastest of all."""
    load = link.load
    info = link.info if link.info is not None else pb.WorkerInfo()
    num_sequences = max(len(link.passengers), load.num_sequences)
    lines = [load.itl] if load.itl.is_measured else [other.load.itl for other in pool if other.load.itl.is_measured]
    return WorkerView(
        worker_id=link.worker_id,
        ready=link.takes_work,
        expected=link.endpoint.is_expected,
        has_room=load.has_room,
        has_refused=load.has_refused,
        num_queued_tokens=load.num_queued_tokens,
        num_sequences=num_sequences,
        num_blocks_free=load.num_blocks_free,
        num_blocks_total=info.num_blocks_total,
        next_itl_ms=min((line.at(num_sequences + 1) for line in lines), default=assumed_itl_ms(num_sequences + 1)),
        alone_itl_ms=min((line.at(1) for line in lines), default=assumed_itl_ms(1)),
        itl_limit_ms=min((passenger.itl_limit_ms for passenger in link.passengers.values()), default=math.inf),
        move_ms_per_token=_move_ms_per_token(link, pool),
        local_prefill_ms_per_token=_local_prefill_ms(link, [*pool, *prefill]) if info.computes_prompts else None,
    )


def _local_prefill_ms(link: WorkerLink, others: Iterable[WorkerLink]) -> float:
    if link.load.prefill_ms_per_token is not None:
        return link.load.prefill_ms_per_token
    measured = (other.load.prefill_ms_per_token for other in others)
    return min((ms for ms in measured if ms is not None), default=DEFAULT_PREFILL_MS_PER_TOKEN)


def _move_ms_per_token(link: WorkerLink, pool: Iterable[WorkerLink]) -> float:
    ms_per_byte = link.load.move_ms_per_byte
    if ms_per_byte is None:
        moves = (other.load.move_ms_per_byte for other in pool)
        ms_per_byte = min((ms for ms in moves if ms is not None), default=None)
    if ms_per_byte is None or link.info is None:
        return DEFAULT_MOVE_MS_PER_TOKEN
    return ms_per_byte * link.info.bytes_per_token
