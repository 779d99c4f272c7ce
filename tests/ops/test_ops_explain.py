"""`pd-relay explain` against a router over stub workers."""

from __future__ import annotations

import asyncio

import pytest

from pd_engine.contracts import api_pb2
from pd_ops.commands.explain import report_document, report_text
from support.commands import Finished, run_command
from support.router_lab import router_lab

TOKENS = ",".join(str(token) for token in range(100, 140))


def report(**fields: object) -> api_pb2.PlacementReport:
    return api_pb2.PlacementReport(
        kind="remote", prefill_worker="p0", decode_worker="d0", ttft_ms=12.0, num_prompt_tokens=40,
        num_hashed_blocks=2, **fields,  # type: ignore[arg-type]
    )


async def test_the_command_shows_all_candidates() -> None:
    async with router_lab(num_decode=2) as lab:
        arguments = ("explain", "--token-ids", TOKENS, "--max-tokens", "5", "--address", lab.grpc_address)
        text = await asyncio.to_thread(run_command, *arguments)
        json_form = await asyncio.to_thread(run_command, *arguments, "--json")
    assert text.code == 0, text.stderr
    lines = text.stdout.splitlines()
    assert lines[0] == (
        "remote prefill at prefill-0, decode at decode-0; first token in about 40.0 ms (40 tokens to prefill, 2 full "
        "blocks)"
    )
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["*", "prefill", "prefill-0"], ["*", "decode", "decode-0"], ["decode", "decode-1", "0"]
    ]
    assert lines[-1] == "local prefill: not offered by the decode worker"
    check_document(json_form)


def check_document(finished: Finished) -> None:
    document = finished.document
    assert (document["kind"], document["prefill_worker"], document["refusal"]) == ("remote", "prefill-0", None)
    assert document["ttft_ms"] == pytest.approx(40.0)
    assert [sorted(candidate["terms_ms"]) for candidate in document["candidates"]] == [
        ["compute", "delay", "queue"], ["hold", "move", "stay"], ["hold", "move", "stay"]
    ]


@pytest.mark.parametrize(
    ("even", "expected"),
    [
        (None, "local prefill: not offered by the decode worker"),
        (float("inf"), "local prefill: costs no more a token than a handoff"),
        (37.2, "local prefill: pays up to 37 uncached tokens"),
    ],
)
def test_the_rule_for_local_prefill_is_shown(even: float | None, expected: str) -> None:
    document = report_document(report() if even is None else report(break_even_tokens=even))
    assert report_text(document).splitlines()[-1] == expected


def test_a_refusal_is_shown_as_one() -> None:
    refused = api_pb2.PlacementReport(kind="refused", refusal="decode: no worker has room now", num_prompt_tokens=40)
    refused.candidates.add(part="decode", worker_id="d0", exclusion="no room now")
    lines = report_text(report_document(refused)).splitlines()
    assert lines[0] == "refused: decode: no worker has room now (40 tokens to prefill, 0 full blocks)"
    assert "no room now" in lines[2]
