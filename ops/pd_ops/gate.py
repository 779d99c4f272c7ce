"""The gate before a release: every test, the slow ones too, the demo and the verification, and a report of what was
seen. `make gate` runs it after `make check`.

    python -m pd_ops.gate --report docs/gate.md

Exit status 1 if anything failed. The report is written either way, and says so: a red gate's numbers count for nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

VERSIONS = ("pd-relay", "torch", "ray", "grpcio", "numpy", "tokenizers", "safetensors", "transformers", "pytest")
NUM_SLOWEST = 5
NUM_AT_ONCE = "2"  # test files


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Of a pytest run. `by_folder`: tests in each folder of tests/; `why_skipped`: tests by the reason."""

    passed: int
    failed: int
    skipped: int
    by_folder: dict[str, int]
    slowest: tuple[tuple[float, str], ...]
    why_skipped: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One command: whether it succeeded, how long it took, and what it found, in a few words."""

    name: str
    passed: bool
    seconds: float
    found: str


def parse_junit(text: str) -> Counts:
    """Counts from pytest's JUnit file."""
    cases = list(ET.fromstring(text).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    folders = Counter(case.get("classname", "").removeprefix("tests.").partition(".")[0] for case in cases)
    timed = sorted(((float(case.get("time", 0)), str(case.get("name"))) for case in cases), reverse=True)
    return Counts(
        passed=len(cases) - len(failed) - len(skipped), failed=len(failed), skipped=len(skipped),
        by_folder=dict(sorted(folders.items())), slowest=tuple(timed[:NUM_SLOWEST]),
        why_skipped=dict(Counter(case.findall("skipped")[0].get("message", "") for case in skipped).most_common()),
    )


def tests_found(counts: Counts) -> str:
    return f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped"


def demo_found(document: dict[str, Any]) -> str:
    """From `pd-relay demo --json`."""
    return (
        f"{document['identical']} of {document['requests']} identical to monolithic; time to first token p50 "
        f"{document['ttft']['p50_ms']:.0f} ms, between tokens p50 {document['itl']['p50_ms']:.1f} ms; "
        f"{document['total_rss_bytes'] / 2**20:.0f} MiB resident; ready after {document['ready_seconds']:.0f} s"
    )


def verify_found(document: dict[str, Any]) -> str:
    """From `pd-relay verify --json`."""
    return (
        f"{document['identical']} of {document['count']} identical to monolithic, {document['handed_over']} handed "
        f"over, {document['handoff_bytes']} bytes"
    )


def render(*, when: datetime, source: str, machine: str, steps: Sequence[StepResult], counts: Counts | None) -> str:
    """The report."""
    failed = [step.name for step in steps if not step.passed]
    verdict = f"**Failed: {', '.join(failed)}.** No number below counts." if failed else "**Passed.**"
    lines = ["# Gate", "", f"{verdict} {when:%Y-%m-%d}, {source}.", "", machine, ""]
    lines += ["| step | result | seconds | found |", "|---|---|---|---|"]
    lines += [
        f"| {step.name} | {'passed' if step.passed else '**failed**'} | {step.seconds:.0f} | {step.found} |"
        for step in steps
    ]
    if counts is not None:
        lines += ["", "Tests by folder: " + ", ".join(f"{name} {n}" for name, n in counts.by_folder.items()) + "."]
        lines += ["", "Slowest: " + ", ".join(f"`{name}` {seconds:.0f} s" for seconds, name in counts.slowest) + "."]
        if counts.why_skipped:
            lines += ["", "Not run, and so not counted as passed:", ""]
            lines += [f"- {count}: {reason}" for reason, count in counts.why_skipped.items()]
    return "\n".join([*lines, "", "Written by `make gate`.", ""])


def describe_machine() -> str:
    """Processor, memory and versions, in two sentences."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    models = [value.strip() for name, value in fields.items() if name.strip() == "model name"]
    flags = next((value.split() for name, value in fields.items() if name.strip() == "flags"), [])
    sets = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = models[0] if models else platform.processor()
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    return (
        f"{processor} ({', '.join(sets) or 'no vector extensions'}), {os.cpu_count()} cores, {memory_gib:.0f} GiB. "
        f"Python {platform.python_version()}, {versions}."
    )


def describe_source(root: Path) -> str:
    """The commit, and whether the tree differs from it."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD") or "no commit"
    return f"commit {commit}{', with changes' if _git(root, 'status', '--porcelain', '-uno') else ''}"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=False, capture_output=True, text=True).stdout.strip()


def run_tests(root: Path) -> tuple[StepResult, Counts | None]:
    """All tests, the slow ones included, shown as they run."""
    with tempfile.TemporaryDirectory(prefix="pd-relay-gate-") as folder:
        path = Path(folder) / "junit.xml"
        began = time.monotonic()
        command = [
            sys.executable, "-m", "pytest", "-n", NUM_AT_ONCE, "--dist", "loadfile", "--no-loadscope-reorder",
            "--max-worker-restart=1", "--hypothesis-profile", "searching", f"--junitxml={path}",
        ]
        code = subprocess.run(command, cwd=root, check=False).returncode
        seconds = time.monotonic() - began
        counts = parse_junit(path.read_text(encoding="utf-8")) if path.exists() else None
    found = tests_found(counts) if counts else f"pytest ended with {code} and no report"
    return StepResult(name="tests", passed=code == 0, seconds=seconds, found=found), counts


def run_command(name: str, arguments: list[str], root: Path) -> tuple[StepResult, dict[str, Any] | None]:
    """A `pd-relay` command with --json; (result with an empty `found`, its document if it printed one)."""
    print(f"gate: pd-relay {' '.join(arguments)}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pd_ops.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=root, check=False, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - began
    lines = done.stdout.splitlines()
    document = json.loads(lines[-1]) if lines else None
    return StepResult(name=name, passed=done.returncode == 0, seconds=seconds, found=""), document


def main(report: Annotated[Path, typer.Option(help="where the report goes")] = Path("docs/gate.md")) -> None:
    root = Path(__file__).resolve().parents[2]
    tests, counts = run_tests(root)
    steps = [tests]
    for name, arguments, describe in (
        ("demo", ["demo"], demo_found),
        ("verify", ["verify", "--count", "50"], verify_found),
    ):
        step, document = run_command(name, arguments, root)
        found = describe(document) if document and "error" not in document else f"no result: {document}"
        steps.append(StepResult(name=name, passed=step.passed, seconds=step.seconds, found=found))
    text = render(
        when=datetime.now(UTC), source=describe_source(root), machine=describe_machine(), steps=steps, counts=counts
    )
    (root / report).write_text(text, encoding="utf-8")
    print(text)
    if not all(step.passed for step in steps):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
