"""`pd-relay diagnose`: what held requests up, in order, each with its evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_ops.bench.serve.about import text_of
from pd_ops.bench.serve.diagnose import Finding, diagnose, largest
from pd_ops.bench.serve.result import read_result
from pd_ops.commands import options


def command(
    context: typer.Context,
    result: Annotated[Path, typer.Argument(help="A result's folder with its records.jsonl.")],
    as_json: options.Json = False,
) -> None:
    """Say where requests of a result of bench serve spent their time (queue, room, prefill rate, link, decode step,
    router), by what evidence, and what a part twice as fast would be worth."""
    output = options.start(context, as_json)
    found = read_result(result)
    findings = diagnose(found)
    most = largest(findings)
    output.document({
        "identity": found.identity, "largest": most.part.value, "findings": [one.to_json() for one in findings],
    })
    output.text(text_of(found.identity) + "\n")
    output.text("\n".join(map(_text, findings)))
    output.text(f"\nmost of a request's time: {most.part.value}")


def _text(finding: Finding) -> str:
    share = "" if finding.share is None else f": {finding.share:.1%} of the mean request's time"
    lines = [f"{finding.part.value}{share}", *(f"  {sentence}" for sentence in finding.evidence)]
    if finding.faster_ms is not None:
        lines.append(f"  twice as fast: {finding.faster_ms:,.1f} ms less a request, {finding.more_good} more good ones")
    return "\n".join(lines)
