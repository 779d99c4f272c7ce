"""One line of JSON for each choice that has ended, without what was asked or answered."""

from __future__ import annotations

import json
import logging

from pd_router.running import RunningChoice, RunningRequest

log = logging.getLogger(__name__)


def log_end(running: RunningRequest, choice: RunningChoice, *, seconds: float) -> None:
    """`seconds`: from its start. Of the key there is the name only."""
    if not log.isEnabledFor(logging.INFO):
        return
    request, journey = choice.request, choice.journey
    last = choice.timeline.attempts[-1] if choice.timeline is not None and choice.timeline.attempts else None
    first_token_s = None if choice.timeline is None else choice.timeline.first_token_s
    line = {
        "request_id": request.request_id,
        "choice": request.choice,
        "key": running.caller.name or None,
        "journey": journey.journey_id,
        "end": journey.state.value,
        "attempts": journey.attempt,
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": journey.num_cached_tokens,
        "completion_tokens": len(journey.stream.tokens),
        "replayed_tokens": journey.stream.num_replayed,
        "prefill_worker": None if last is None else last.prefill_worker,
        "decode_worker": None if last is None else last.decode_worker or None,
        "first_token_ms": None if first_token_s is None else round(first_token_s * 1000, 1),
        "ms": round(seconds * 1000, 1),
        "error": None if journey.error is None else journey.error.code.value,
        "message": None if journey.error is None else journey.error.message,
    }
    log.info("%s", json.dumps(line))
