"""What a drill makes of what it saw: resumed streams, losses, expectations that must fail when they are not met."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition, PdRelayError, Unavailable
from pd_engine.text.defaults import SamplingFields
from pd_ops.commands.drill import _all_of, _one
from pd_ops.drills.catalog import DRILLS
from pd_ops.drills.hands import HostFault, HostHands, LocalHands
from pd_ops.drills.judging import Observed, judge
from pd_ops.drills.observer import SeenWorker, Sighting, falsely_lost, seen_full, seen_lost
from pd_ops.drills.replay import read_replay
from pd_ops.drills.report import summary, to_markdown
from pd_ops.drills.scene import Broken
from pd_ops.drills.traffic import Asked, Schedule, Traffic
from pd_ops.launcher.remote_shell import RemoteShell
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.outcome import Outcome
from pd_ops.verification.remote import Request

SIZES = {"prefill": 1, "decode": 2}
EPOCHS = {"prefill-0": "p", "decode-0": "a", "decode-1": "b"}
OUTCOME = Outcome(
    token_ids=(1, 2, 3), text="abc", finish_reason="length", stop_reason="", seed=1, logprobs=(), num_prompt_tokens=1,
    num_cached_tokens=0, block_checksums=(), handoff_bytes=None,
)
REQUESTS = [Request(prompt=TokensPrompt(token_ids=(1,)), sampling=SamplingFields(seed=1))] * 3


def asked(start_s: float, *arrivals_s: float, **values: Any) -> Asked:
    defaults = {"number": 0, "end_s": arrivals_s[-1], "token_ids": [1, 2, 3], "outcome": OUTCOME}
    return Asked(start_s=start_s, arrivals_s=list(arrivals_s), **{**defaults, **values})


def sighting(time_s: float, lost: str = "", epochs: Mapping[str, str] = EPOCHS) -> Sighting:
    return Sighting(time_s=time_s, workers={
        name: SeenWorker(role=name.partition("-")[0], is_ready=name != lost, epoch=epoch)
        for name, epoch in epochs.items()
    })


SIGHTINGS = (
    sighting(9.0), sighting(10.0), sighting(10.2, lost="decode-0"),
    sighting(14.0, epochs={**EPOCHS, "decode-0": "c"}),
)
SEEN = Observed(
    asked=[asked(8.0, 9.0), asked(9.5, 9.9, 12.4)], steady=[asked(8.0, 9.0), asked(9.5, 9.9, 12.4)], differences={},
    num_leaked_blocks=0, sizes=SIZES, sightings=SIGHTINGS,
    broken=Broken(at_s=10.0, target="decode-0", epoch="a", is_over_s=10.0), is_mended=None, full_s=14.0,
)


def test_a_resumed_stream_repeats_and_goes_on() -> None:
    one = asked(0.0, 0.5, token_ids=[1, 2, 3])
    one.take(0, [1, 2], 1.0)
    assert one.mismatch is None
    one.take(2, [3, 4], 2.0)
    assert (one.token_ids, one.arrivals_s) == ([1, 2, 3, 4], [0.5, 2.0])
    one.take(1, [2, 9], 3.0)
    assert one.mismatch is not None


def test_a_stream_that_skips_is_wrong() -> None:
    one = asked(0.0, 0.5, token_ids=[1])
    one.take(2, [3], 1.0)
    assert one.mismatch is not None


def test_the_largest_gap_counts_from_the_request_to_its_end() -> None:
    assert asked(0.0, 1.0, 1.5, end_s=1.6).largest_gap_ms() == 1_000
    assert asked(0.0, 0.5, 0.7, end_s=2.7).largest_gap_ms() == 2_000


def test_a_loss_is_seen_by_state_or_by_epoch() -> None:
    assert seen_lost(SIGHTINGS, "decode-0", "a", 10.0) == 10.2
    assert seen_lost([SIGHTINGS[1], SIGHTINGS[3]], "decode-0", "a", 10.0) == 14.0
    assert seen_lost(SIGHTINGS, "decode-1", "b", 10.0) is None
    assert seen_lost([sighting(10.0), Sighting(time_s=10.1, workers=None)], None, "", 10.0) == 10.1
    assert seen_full(SIGHTINGS, SIZES, 10.1) == 14.0
    assert seen_full([*SIGHTINGS[:3], Sighting(time_s=11.0, workers=None)], SIZES, 10.1) is None


def test_a_loss_is_counted_from_when_the_router_knew_of_it() -> None:
    def seen(in_state_s: float, epoch: str = "a") -> list[Sighting]:
        worker = SeenWorker(role="decode", is_ready=False, epoch=epoch, in_state_s=in_state_s)
        return [SIGHTINGS[1], Sighting(time_s=10.5, workers={"decode-0": worker})]

    assert seen_lost(seen(0.375), "decode-0", "a", 10.0) == 10.125
    assert seen_lost(seen(3.0), "decode-0", "a", 10.0) == 10.0, "never before it was broken"
    assert seen_lost(seen(0.375, epoch="c"), "decode-0", "a", 10.0) == 10.5, "that is another life's state"


def test_who_was_not_touched_and_left_is_falsely_lost() -> None:
    assert falsely_lost(SIGHTINGS, {"decode-0"}, 10.0) == []
    assert falsely_lost(SIGHTINGS, {"decode-1"}, 10.0) == ["decode-0"]
    restarted = [sighting(9.0), sighting(11.0, epochs={**EPOCHS, "prefill-0": "q"})]
    assert falsely_lost(restarted, {"decode-0"}, 10.0) == ["prefill-0"]


def test_all_is_well() -> None:
    result = judge("kill-decode", DRILLS["kill-decode"], SEEN, seconds=5.0, load=1.0)
    assert result.passed, result
    figures = result.figures
    assert (figures.detection_s, figures.full_capacity_s) == (pytest.approx(0.2), 4.0)
    assert (figures.gap_p99_ms, figures.normal_gap_p99_ms) == (pytest.approx(2_500), 1_000)


UNMET = {
    "no request is lost": replace(SEEN, asked=[asked(8.0, 9.0, outcome=None, error="no answer in 1 s")]),
    "no answer differs from one process": replace(SEEN, differences={1: "token 0: 1 instead of 2"}),
    "no block is held afterwards": replace(SEEN, num_leaked_blocks=3),
    "both pools are whole again": replace(SEEN, full_s=None),
    "no stream is cut": replace(SEEN, asked=[asked(8.0, 9.0, num_broken=1)]),
    "no request is refused": replace(SEEN, asked=[asked(8.0, 9.0, num_refused=1)]),
    "the router notices": replace(SEEN, sightings=[sighting(9.0), sighting(11.0)]),
    "nobody else is taken for lost": replace(SEEN, sightings=[*SIGHTINGS, sighting(15.0, lost="prefill-0")]),
}


@pytest.mark.parametrize("name", UNMET)
def test_each_expectation_fails_alone(name: str) -> None:
    result = judge("kill-decode", DRILLS["kill-decode"], UNMET[name], seconds=5.0, load=1.0)
    assert [one.name for one in result.expectations if not one.is_met] == [name]
    document = summary([result], {
        "cluster": "a", "model": "m", "clients": 1, "pools": SIZES, "trace": None, "rate_per_s": None,
    })
    assert not document["passed"]
    assert f"**not met**: {name}" in to_markdown(document, "today")


def test_where_refusals_and_cut_streams_belong_to_it_they_fail_nothing() -> None:
    seen = replace(
        SEEN, asked=[asked(8.0, 9.0, num_refused=5, num_broken=1)],
        sightings=[sighting(9.0), Sighting(time_s=10.1, workers=None), sighting(14.0)],
        broken=Broken(at_s=10.0, is_over_s=10.0),
    )
    assert judge("kill-router", DRILLS["kill-router"], seen, seconds=5.0, load=1.0).passed
    alone = replace(SEEN, sizes={"prefill": 1, "decode": 1}, asked=[asked(8.0, 9.0, num_refused=5)])
    assert judge("kill-decode", DRILLS["kill-decode"], alone, seconds=5.0, load=1.0).passed


class Unlucky:
    """A runner whose drills of hosts cannot be done."""

    async def run(self, name: str) -> Any:
        if DRILLS[name].faults:
            raise FailedPrecondition("h1: kill failed")
        return judge(name, DRILLS["kill-decode"], SEEN, seconds=1.0, load=1.0)


async def test_a_drill_that_cannot_be_done_has_failed_and_others_go_on() -> None:
    runner: Any = Unlucky()
    results = [await _one(runner, name, is_only=False) for name in ("kill-host", "kill-decode")]
    assert [one.passed for one in results] == [False, True]
    document = summary(results, {
        "cluster": "a", "model": "m", "clients": 1, "pools": SIZES, "trace": None, "rate_per_s": None,
    })
    assert not document["passed"]
    text = to_markdown(document, "today")
    assert "- **not met**: the drill can be done: h1: kill failed" in text
    assert re.search(r"\| kill-host \| \*\*failed\*\* \| - \| - ", text), "nothing was measured"
    with pytest.raises(FailedPrecondition, match="h1: kill failed"):
        await _one(runner, "kill-host", is_only=True)


def test_all_means_each_once_and_those_of_hosts_where_there_are_some() -> None:
    def of(head: str | None, *names: str) -> list[str]:
        access: Any = SimpleNamespace(head=head)
        return _all_of(list(names), access)

    assert of("head", "all") == list(DRILLS)
    assert set(DRILLS) - set(of(None, "all")) == {"kill-host", "cut-host", "slow-link", "kill-head"}
    assert of(None, "kill-host", "burst", "kill-host") == ["kill-host", "burst"]


def test_no_drill_at_all_is_not_passed() -> None:
    assert not summary([], {})["passed"]


class Flaky(Traffic):
    """Whose attempts end as they are told."""

    def __init__(self, *ends: PdRelayError | None) -> None:
        super().__init__("127.0.0.1:1", [], num_clients=1, give_up_s=60.0)
        self._ends = list(ends)

    async def _attempt(self, client: Any, asked: Asked) -> None:
        end = self._ends.pop(0)
        if end is None:
            asked.outcome = OUTCOME
            return
        if end.message == "cut":
            asked.take(0, [1], 0.0)
        raise end


async def test_a_client_asks_again_and_counts_what_it_met() -> None:
    traffic = Flaky(Unavailable("cut"), Unavailable("refused"), Unavailable("cut"), None)
    one = Asked(number=0, start_s=0.0)
    await asyncio.wait_for(traffic._ask(None, one), 60)  # type: ignore[arg-type]
    assert (one.num_broken, one.num_refused, one.error, one.outcome) == (2, 1, None, OUTCOME)
    assert one.interruptions == ["cut", "refused", "cut"]
    result = judge("kill-decode", DRILLS["kill-decode"], replace(SEEN, asked=[one]), seconds=5.0, load=1.0)
    assert result.details == ("asked again 2 times: cut", "asked again 1 times: refused")


class Instant(Traffic):
    """Whose requests are answered at once, when `go` is set."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__("127.0.0.1:1", REQUESTS, num_clients=1, give_up_s=60.0, schedule=schedule)
        self.go = asyncio.Event()

    async def _attempt(self, client: Any, asked: Asked) -> None:
        await self.go.wait()
        asked.outcome = OUTCOME


async def test_a_trace_is_asked_when_due_whatever_became_of_what_came_before_and_begins_anew() -> None:
    traffic, began_s = Instant(Schedule(due_s=[0.0, 0.01, 0.02], period_s=0.03)), time.monotonic()
    running = asyncio.create_task(traffic.run())
    while len(traffic.asked) < 7:  # none has been answered  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    traffic.go.set()
    traffic.stop()
    await asyncio.wait_for(running, 60)
    assert [one.number for one in traffic.asked[:7]] == [0, 1, 2, 0, 1, 2, 0]
    assert all(one.outcome is OUTCOME for one in traffic.asked)
    starts = [one.start_s - began_s for one in traffic.asked[:7]]
    assert all(start > 0.0099 * number for number, start in enumerate(starts)), "none before it is due"


async def test_a_trace_ends_between_two_requests() -> None:
    traffic = Instant(Schedule(due_s=[0.0, 3_600.0], period_s=7_200.0))
    traffic.go.set()
    running = asyncio.create_task(traffic.run())
    while not traffic.num_done:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    traffic.stop()
    await asyncio.wait_for(running, 60)
    assert len(traffic.asked) == 1


def test_a_replay_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0000000,400,20\n2023-11-16 18:00:01.0000000,40,2\n2023-11-16 18:00:04.0000000,80,4\n"
    )
    model = api_pb2.GetModelInfoResponse(vocab_size=1_000, max_context_length=210)
    replay = read_replay(trace, model)
    assert (replay.schedule.due_s, replay.schedule.period_s, replay.rate_per_s) == ((0.0, 1.0, 4.0), 6.0, 0.5)
    sizes = [(len(one.prompt.token_ids), one.sampling.max_tokens) for one in replay.requests]  # type: ignore[union-attr]
    assert sizes == [(200, 10), (20, 1), (40, 2)]
    assert len({one.sampling.seed for one in replay.requests}) == 3, "what is compared has a seed"
    assert read_replay(trace, model, rate_per_s=2.0).rate_per_s == pytest.approx(2.0)
    assert read_replay(trace, model).requests == replay.requests


def test_what_a_trace_has_refused_fails_nothing() -> None:
    refused = replace(SEEN, asked=[asked(8.0, 9.0, num_refused=5)])
    assert not judge("kill-decode", DRILLS["kill-decode"], refused, seconds=1.0, load=1.0).passed
    result = judge("kill-decode", DRILLS["kill-decode"], replace(refused, may_be_too_much=True), seconds=1.0, load=1.0)
    assert (result.passed, result.figures.num_refused) == (True, 5)
    text = to_markdown(summary([result], {
        "cluster": "a", "model": "m", "clients": 1, "pools": SIZES, "trace": "day.csv", "rate_per_s": 0.5,
    }), "today")
    assert "requests of the trace `day.csv` when they are due, 0.5 a second" in text


def hands(shell: tuple[str, ...] = (), **commands: str) -> HostHands:
    file: Any = SimpleNamespace(path="cluster.yaml", hands=commands, shell=RemoteShell(prefix=shell))
    return HostHands(file)


async def test_the_way_to_a_host_is_not_counted() -> None:
    late = hands(("sh", "-c", "sleep 0.2; echo welcome; exec sh -c \"$0\""))
    target = await asyncio.create_subprocess_exec("sleep", "1000")
    began_s = time.monotonic()
    at_s = await late.signal("h1", target.pid, signal.SIGTERM)
    assert at_s - began_s >= 0.2
    assert await target.wait() == -signal.SIGTERM
    with pytest.raises(FailedPrecondition, match=r"h1: the signal was not sent: .*No such process"):
        await late.signal("h1", target.pid, signal.SIGTERM)
    with pytest.raises(FailedPrecondition, match="has ended by itself"):
        await LocalHands().signal("h1", target.pid, signal.SIGTERM)


async def test_a_host_that_is_not_reached_is_sent_no_signal() -> None:
    gone = hands(("sh", "-c", "echo no route to h1 >&2; exit 255"))
    with pytest.raises(Unavailable, match="h1 is not reached: no route to h1"):
        await gone.signal("h1", 1, signal.SIGKILL)


async def test_hands_run_the_files_commands(tmp_path: Path) -> None:
    ours = hands((), kill=f"touch {tmp_path}/{{host}}", boot="false", cut="/none/cut {host}")
    await ours.do(HostFault.KILL, "h1")
    assert (tmp_path / "h1").exists()
    for fault, message in ((HostFault.BOOT, "h1: boot failed"), (HostFault.CUT, "h1: cut could not be done"),
                           (HostFault.SLOW, r"cluster.yaml: provider.hands has no command for slow")):
        with pytest.raises(FailedPrecondition, match=message):
            await ours.do(fault, "h1")


def test_drills_of_hosts_need_hosts() -> None:
    for name, drill in DRILLS.items():
        assert bool(drill.faults) == (name in {"kill-host", "cut-host", "slow-link", "kill-head"})
    LocalHands().check()
    with pytest.raises(FailedPrecondition, match="--hosts"):
        LocalHands().check(*DRILLS["kill-host"].faults)


def test_a_host_that_does_not_come_back_is_seen() -> None:
    def found(is_mended: bool | None) -> dict[str, bool]:
        seen = replace(SEEN, is_mended=is_mended)
        result = judge("kill-host", DRILLS["kill-host"], seen, seconds=1.0, load=1.0)
        return {one.name: one.is_met for one in result.expectations}

    assert found(True)["all hosts are back"]
    assert not found(False)["all hosts are back"]
    assert "all hosts are back" not in found(None)


def test_others_on_the_targets_host_are_not_taken_for_falsely_lost() -> None:
    lost = (*SIGHTINGS, sighting(15.0, lost="decode-1"))
    for also, is_met in (((), False), (("decode-1",), True)):
        seen = replace(SEEN, sightings=lost, broken=replace(SEEN.broken, also=also))
        result = judge("kill-host", DRILLS["kill-host"], seen, seconds=1.0, load=1.0)
        assert {one.name: one.is_met for one in result.expectations}["nobody else is taken for lost"] is is_met
