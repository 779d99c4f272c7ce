"""What a router makes of a worker's reports and of what it has sent there since."""

from __future__ import annotations

from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from pd_router.worker_load import WorkerLoad


def reported(**fields: Any) -> WorkerLoad:
    load = WorkerLoad()
    load.note_report(pb.LoadsReply(**fields))
    return load


def test_what_was_sent_since_the_report_is_added_to_it() -> None:
    load = reported(queued_prefill_tokens=100, num_blocks_free=50, num_running=3, num_leases=1)
    load.assign_tokens(30)
    load.assign_blocks(7)
    load.note_arrival("j1")
    assert (load.num_queued_tokens, load.num_blocks_free, load.num_sequences) == (130, 43, 5)
    load.note_report(pb.LoadsReply(queued_prefill_tokens=130, num_blocks_free=43, num_running=3, num_leases=2))
    assert (load.num_queued_tokens, load.num_blocks_free, load.num_sequences) == (130, 43, 5)
    load.note_departure("j1")
    assert load.num_sequences == 5  # the report counts it until the next one


def test_what_is_under_way_counts_even_if_the_report_does_not_know_it() -> None:
    load = reported()
    assigned_at = load.assign_tokens(80)
    load.note_report(pb.LoadsReply())  # Prefill has not arrived there yet
    assert load.num_queued_tokens == 80
    load.note_computed(80, assigned_at)
    assert load.num_queued_tokens == 0


def test_what_is_done_leaves_the_queue_before_the_next_report() -> None:
    load = reported(queued_prefill_tokens=0)
    assigned_at = load.assign_tokens(80)
    load.note_report(pb.LoadsReply(queued_prefill_tokens=90))  # 10 of them are another router's
    load.note_computed(80, assigned_at)
    assert load.num_queued_tokens == 10
    load.note_computed(20, load.assign_tokens(20))
    assert load.num_queued_tokens == 10


def test_speeds_are_those_of_the_last_work() -> None:
    load = reported(prefill_tokens_per_s=2_000.0, itl_ms=12.0, num_running=4, pull_bytes_per_s=1e6)
    load.note_report(pb.LoadsReply(itl_ms=12.0))  # idle: measured with a batch that is gone
    assert (load.prefill_ms_per_token, load.itl.at(4), load.move_ms_per_byte) == (0.5, 12.0, 1e-3)


def test_no_room_lasts_until_the_next_report() -> None:
    load = reported(num_blocks_free=5)
    load.note_no_room()
    assert not load.has_room
    load.assign_blocks(9)
    assert load.num_blocks_free == 0
    load.note_report(pb.LoadsReply(num_blocks_free=5))
    assert load.has_room
    assert not load.has_refused
    assert load.num_blocks_free == 5
    load.note_lost()
    assert load.num_blocks_free == 0


def test_a_worker_where_sequences_wait_for_blocks_has_no_room() -> None:
    load = reported(num_blocks_free=5, num_preempted=1)
    assert not load.has_room
    assert not load.has_refused
    load.note_report(pb.LoadsReply(num_blocks_free=5))
    assert load.has_room
