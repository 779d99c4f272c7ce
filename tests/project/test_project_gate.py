"""The gate's report says what happened, and above all when something failed."""

from __future__ import annotations

from datetime import UTC, datetime

from pd_ops.gate import StepResult, describe_machine, parse_junit, render

JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.engine.test_a" name="test_one" time="1.5"/>
<testcase classname="tests.engine.test_a" name="test_two" time="0.5"><failure message="no">...</failure></testcase>
<testcase classname="tests.journey.test_b" name="test_three" time="9.0"/>
<testcase classname="tests.journey.test_b" name="test_four" time="0.0"><skipped message="gpu"/></testcase>
<testcase classname="tests.journey.test_b" name="test_five" time="0.1"><error message="setup">...</error></testcase>
</testsuite></testsuites>"""


def step(name: str, passed: bool) -> StepResult:
    return StepResult(name=name, passed=passed, seconds=12.3, found="what it found")


def test_counts_come_from_the_test_run() -> None:
    counts = parse_junit(JUNIT)
    assert (counts.passed, counts.failed, counts.skipped) == (2, 2, 1)
    assert counts.by_folder == {"engine": 2, "journey": 3}
    assert counts.slowest[0] == (9.0, "test_three")


def test_a_report_names_what_failed_first() -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    steps = [step("tests", True), step("demo", False), step("verify", True)]
    text = render(when=when, source="commit abc", machine="A machine.", steps=steps, counts=parse_junit(JUNIT))
    assert "**Failed: demo.** No number below counts. 2026-01-02, commit abc." in text
    assert "| demo | **failed** | 12 | what it found |" in text
    assert "engine 2, journey 3" in text
    assert "Not run, and so not counted as passed:\n\n- 1: gpu\n" in text, "what is left out is said, with the reason"


def test_a_report_of_a_passed_gate_says_so() -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    text = render(when=when, source="commit abc", machine="A machine.", steps=[step("tests", True)], counts=None)
    assert "**Passed.**" in text
    assert "ailed" not in text


def test_the_machine_is_described_by_what_matters() -> None:
    text = describe_machine()
    assert "cores" in text
    assert "torch" in text
