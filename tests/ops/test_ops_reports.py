"""A difference is shown, counted, and ends a command with status 1."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from pd_engine.text.defaults import SamplingFields
from pd_ops.demonstration import DemoReport, DemoResult, concurrent_requests, shown_requests
from pd_ops.latency import StreamTiming
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.cases import Case
from pd_ops.verification.outcome import Outcome
from pd_ops.verification.report import CheckedCase, Report
from support.commands import environment

OUTCOME = Outcome(
    token_ids=(1, 2), text="ab", finish_reason="length", stop_reason="", seed=3, logprobs=(), num_prompt_tokens=4,
    num_cached_tokens=0, block_checksums=(11,), handoff_bytes=40,
)
GREEDY = SamplingFields(temperature=0.0, speculate=0)
CASE = Case(number=0, prompt=TokensPrompt(token_ids=(1, 2, 3, 4)), sampling=GREEDY)
SAME = CheckedCase(case=CASE, expected=replace(OUTCOME, handoff_bytes=None), got=OUTCOME, difference=None)
OTHER = replace(SAME, case=replace(CASE, number=1), difference="token 1: 3 instead of 2")
REPORT = Report(
    model="m", fingerprint="f", cluster="c", bytes_per_token=10, seconds=1.0, num_moves=3, checked=(SAME, OTHER)
)


def test_a_verification_with_a_difference() -> None:
    document = REPORT.to_json()
    assert (document["count"], document["identical"], document["different"]) == (2, 1, 1)
    assert document["cases"][1]["difference"] == "token 1: 3 instead of 2"
    assert (document["handed_over"], document["handoff_bytes"]) == (2, 80)
    *_, identical, first = REPORT.to_text().splitlines()
    assert identical == "identical to monolithic: 1 of 2"
    assert first == "first difference: case 1 (greedy, speculation off, 4 prompt tokens): token 1: 3 instead of 2"


def test_it_ends_the_command_with_status_1(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import pd_ops.cli, pd_ops.commands.verify as command\n"
        "from test_ops_reports import REPORT\n"
        "async def verify(*arguments): return REPORT\n"
        "command.verify = verify\n"
        "pd_ops.cli.main(['verify', '--against', 'h:1', '--json'])\n"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], capture_output=True, text=True, check=False,
        env=environment(PYTHONPATH=str(tests)),
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["different"] == 1


def demo_report(*results: DemoResult) -> DemoReport:
    return DemoReport(
        results=results, bytes_per_token=10, total_rss_bytes=2**30, ready_seconds=1.0, seconds=2.0
    )


RESULT = DemoResult(
    outcome=OUTCOME, timing=StreamTiming(start=0.0, arrivals=((0.1, 1), (0.2, 1))), accepted_tokens=1,
    drafted_tokens=2, difference=None,
)


def test_a_demonstration() -> None:
    text = demo_report(RESULT, RESULT).to_text()
    assert text.splitlines()[-1] == "identical to monolithic: 2 of 2"
    assert "80 bytes = 8 slots x 10 bytes: as expected" in text
    assert "p50 100.0 ms, p99 100.0 ms" in text
    assert "2 of 4 (50%)" in text
    assert demo_report(RESULT).to_json()["identical"] == 1


def test_a_demonstration_that_fails_says_what_differs() -> None:
    wrong = replace(RESULT, difference="text: 'x' instead of 'y'", outcome=replace(OUTCOME, handoff_bytes=30))
    report = demo_report(RESULT, wrong)
    assert report.num_identical == 1
    assert report.to_text().splitlines()[-2:] == [
        "request 1: text: 'x' instead of 'y'", "identical to monolithic: 1 of 2",
    ]
    assert "70 bytes != 8 slots x 10 bytes: EXPECTED 80" in report.to_text()
    assert report.to_json()["differences"] == ["request 1: text: 'x' instead of 'y'"]


def test_what_the_demonstration_asks() -> None:
    requests = [*shown_requests(), *concurrent_requests()]
    assert len(requests) == 15
    assert len({request.request.sampling.seed for request in requests}) == 15
    assert len(concurrent_requests()[-1].text) > 10 * len(concurrent_requests()[0].text)
