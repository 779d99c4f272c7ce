"""A decision as a message: every candidate with its costs."""

from __future__ import annotations

from pd_engine.contracts import api_pb2 as api
from pd_router.explanation import Candidate, break_even_tokens, candidates, chosen_workers
from pd_router.placement import Placement, Refusal


def report_message(decision: Placement | Refusal) -> api.PlacementReport:
    report = api.PlacementReport(
        kind="refused",
        num_prompt_tokens=decision.request.num_tokens,
        num_hashed_blocks=len(decision.request.block_hashes),
    )
    chosen: dict[str, str] = {}
    if isinstance(decision, Placement):
        chosen = chosen_workers(decision)
        report.kind = decision.kind.value
        report.prefill_worker = decision.prefill_worker
        report.decode_worker = decision.decode_worker or ""
        report.ttft_ms = decision.ttft_ms
        if decision.prefix is not None:
            report.prefix_worker = decision.prefix.worker_id
            report.num_prefix_blocks = decision.prefix.num_blocks
        even = break_even_tokens(decision)
        if even is not None:
            report.break_even_tokens = even
    else:
        report.refusal = f"{decision.role}: {decision.kind.value}"
    report.candidates.extend(
        _candidate_message(candidate, chosen.get(candidate.part) == candidate.worker_id)
        for candidate in candidates(decision)
    )
    return report


def _candidate_message(candidate: Candidate, chosen: bool) -> api.PlacementCandidate:
    return api.PlacementCandidate(
        part=candidate.part,
        worker_id=candidate.worker_id,
        chosen=chosen,
        num_held_blocks=candidate.num_held_blocks,
        terms=[api.CostTerm(name=name, ms=ms) for name, ms in candidate.terms.items()],
        exclusion=candidate.exclusion.value if candidate.exclusion is not None else "",
    )
