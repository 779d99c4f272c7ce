"""Diagnoses of requests that were made slow on purpose, in one part each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.diagnose import diagnose, largest
from pd_ops.bench.serve.record import Outcome, Record
from pd_ops.bench.serve.request_parts import Part, cut, prefill_rate
from pd_ops.bench.serve.result import Result
from pd_ops.bench.serve.summary import Targets, summarize
from support.commands import run_command
from support.serve_results import example, write_example


def request(
    number: int, *, queue_ms: float = 0.0, prompt: int | None = None, ms_per_token: float = 0.1, fixed_ms: float = 5.0,
    gap_ms: float = 0.0, itl_ms: float = 10.0, tells_queue: bool = True, lag_ms: float = 0.0, **fields: Any,
) -> Record:
    """One whose time is made of these parts; prompts of different lengths, eleven tokens."""
    tokens = 100 * (1 + number % 4) if prompt is None else prompt
    due_s = number * 1.0
    sent_s = due_s + lag_ms / 1e3
    first = sent_s + (queue_ms + fixed_ms + ms_per_token * tokens) / 1e3
    times = [first, *(first + (gap_ms + itl_ms * (step + 1)) / 1e3 for step in range(10))]
    return Record(
        number=number, kind="x", intended_s=due_s, sent_s=sent_s, end_s=times[-1], outcome=Outcome.FINISHED,
        prompt_tokens=tokens, asked_tokens=11, arrivals=tuple((at, 1) for at in times), num_cached_tokens=0,
        handoff_bytes=1000, hidden_bytes=900, queue_ms=queue_ms if tells_queue else None, **fields,
    )


def result(records: list[Record], targets: Targets | None = None, **fields: Any) -> Result:
    targets = targets or Targets()
    made = example()
    document = made.document | {
        "targets": targets.to_json(), "summary": summarize(records, targets, span_s=100.0), **fields,
    }
    return replace(made, document=document, records=tuple(records))


def test_parts_of_a_request_add_up() -> None:
    records = [request(number, queue_ms=7.0, gap_ms=30.0, lag_ms=2.0) for number in range(12)]
    rate = prefill_rate(records)
    assert rate.ms_per_token == pytest.approx(0.1)
    assert rate.fixed_ms == pytest.approx(5.0)
    for record in records:
        times = cut(record, rate)
        assert times.total == pytest.approx(1e3 * (record.end_s - record.intended_s))
        assert {part: round(ms, 3) for part, ms in times.parts.items()} == {
            Part.QUEUE: 9.0, Part.PREFILL: 0.1 * record.prompt_tokens, Part.LINK: 30.0, Part.DECODE: 100.0,
            Part.ROUTER: 5.0,
        }


def test_cached_tokens_are_not_computed() -> None:
    warm = [replace(request(number, prompt=100), prompt_tokens=1100, num_cached_tokens=1000) for number in range(8)]
    rate = prefill_rate([request(number) for number in range(12)])
    assert cut(warm[0], rate).parts[Part.PREFILL] == pytest.approx(10)


@pytest.mark.parametrize(("slow", "part"), [
    ({"queue_ms": 900.0}, Part.QUEUE), ({"lag_ms": 900.0}, Part.QUEUE), ({"ms_per_token": 5.0}, Part.PREFILL),
    ({"gap_ms": 500.0}, Part.LINK), ({"itl_ms": 80.0}, Part.DECODE), ({"fixed_ms": 900.0}, Part.ROUTER),
])
@pytest.mark.parametrize("tells_queue", [True, False])
def test_the_slow_part_is_named(slow: dict[str, float], part: Part, tells_queue: bool) -> None:
    """Even where the endpoint tells no queue, as long as not every request waited the same."""
    records = []
    for number in range(40):
        fields = dict(slow)
        if part is Part.QUEUE:
            fields = {name: value * (number // 4 % 5) / 2 for name, value in slow.items()}
        records.append(request(number, tells_queue=tells_queue, **fields))
    assert largest(diagnose(result(records))).part is part


def test_questions_come_in_order_with_evidence() -> None:
    findings = diagnose(result([request(number) for number in range(10)]))
    assert [one.part for one in findings] == list(Part)
    assert all(one.evidence for one in findings)
    assert sum(one.share or 0.0 for one in findings) == pytest.approx(1.0)


def test_worth_of_a_part_twice_as_fast() -> None:
    """Half of 900 ms of queue brings six requests below 600 ms; nothing else would."""
    records = [request(number, queue_ms=900.0 if number < 6 else 0.0) for number in range(20)]
    findings = {one.part: one for one in diagnose(result(records, Targets(ttft_ms=600.0)))}
    assert findings[Part.QUEUE].more_good == 6
    assert findings[Part.DECODE].more_good == 0
    assert findings[Part.QUEUE].faster_ms == pytest.approx(900 * 6 / 20 / 2)
    slow = [request(number, itl_ms=80.0) for number in range(10)]
    by_itl = {one.part: one for one in diagnose(result(slow, Targets(itl_ms=50.0)))}
    assert by_itl[Part.DECODE].more_good == 10
    assert by_itl[Part.QUEUE].more_good == 0


def test_the_end_of_a_stream_makes_no_token_late() -> None:
    """Two seconds until the stream is closed: tokens come no sooner if that takes one."""
    records = [request(number, fixed_ms=50.0) for number in range(20)]
    open_ = [replace(record, end_s=record.end_s + 2.0) for record in records]
    router = {one.part: one for one in diagnose(result(open_, Targets(ttft_ms=55.0)))}[Part.ROUTER]
    assert router.more_good == {
        one.part: one for one in diagnose(result(records, Targets(ttft_ms=55.0)))
    }[Part.ROUTER].more_good
    tight = {one.part: one for one in diagnose(result(open_, Targets(ttft_ms=20.0)))}[Part.ROUTER]
    assert tight.more_good == 0


def test_a_queue_that_grows_is_said_to() -> None:
    grows = diagnose(result([request(number, queue_ms=100.0 * number) for number in range(20)]))[0]
    stays = diagnose(result([request(number, queue_ms=100.0) for number in range(20)]))[0]
    assert any("it grew" in line for line in grows.evidence)
    assert any("did not grow" in line for line in stays.evidence)


def test_room_is_told_from_the_pools() -> None:
    pool = {"num_blocks_total": 100, "num_blocks_free": 40, "num_moves_total": 1, "num_recomputed_total": 0}
    full = pool | {"num_blocks_free": 3, "num_moves_total": 5}
    samples = [{"prefill": pool, "decode": pool}, {"prefill": pool, "decode": full}]
    room = diagnose(result([request(number) for number in range(8)], pools=samples))[1]
    assert room.part is Part.ROOM
    assert "decode: at least 3% of blocks were free, 4 moves to host memory, 0 computed again" in room.evidence
    assert room.share is None
    silent = diagnose(result([request(number) for number in range(8)], pools=[]))[1]
    assert "told nothing" in silent.evidence[-1]


def test_a_few_requests_tell_a_rate_and_nothing_fixed() -> None:
    rate = prefill_rate([request(number, prompt=1000, fixed_ms=50.0) for number in range(9)])
    assert rate.fixed_ms == 0
    assert rate.ms_per_token == pytest.approx(0.15)


def test_answers_of_one_token_and_equal_prompts() -> None:
    records = [replace(request(number, prompt=50), arrivals=((number + 0.1, 1),), end_s=number + 0.1)
               for number in range(12)]
    findings = {one.part: one for one in diagnose(result(records))}
    assert "no answer had a second token" in findings[Part.DECODE].evidence
    assert "did not come later for longer prompts" in findings[Part.PREFILL].evidence[0]


def test_too_few_requests(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="at least 5 finished requests, there are 4"):
        diagnose(result([request(number) for number in range(4)]))
    folder = write_example(tmp_path / "r")
    (folder / "records.jsonl").unlink()
    finished = run_command("diagnose", folder)
    assert finished.code == 2
    assert "there are 0" in finished.stderr
