"""When a choice has lost its router."""

from __future__ import annotations

from decode_worker.silence import RouterWatch


def test_a_router_that_reads_is_never_silent() -> None:
    watch = RouterWatch(2.0)
    assert not watch.is_silent("r", is_listening=True, heard_s=0.0, now_s=1_000.0)


def test_silence_counts_from_the_last_word() -> None:
    watch = RouterWatch(2.0)
    assert not watch.is_silent("r", is_listening=False, heard_s=10.0, now_s=11.9)
    assert watch.is_silent("r", is_listening=False, heard_s=10.0, now_s=12.0)
    watch.left("r", 15.0)
    assert not watch.is_silent("r", is_listening=False, heard_s=10.0, now_s=16.9)
    assert watch.is_silent("r", is_listening=False, heard_s=10.0, now_s=17.0)
    assert not watch.is_silent("r", is_listening=False, heard_s=16.0, now_s=17.0)
    assert watch.is_silent("other", is_listening=False, heard_s=10.0, now_s=16.0)


def test_routers_without_choices_are_forgotten() -> None:
    watch = RouterWatch(2.0)
    watch.left("r", 15.0)
    watch.keep({"other"})
    assert watch.is_silent("r", is_listening=False, heard_s=10.0, now_s=16.0)
