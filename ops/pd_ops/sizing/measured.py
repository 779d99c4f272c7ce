"""What a measured cluster was set to, for a simulation of the same."""

from __future__ import annotations

from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.result import Result

SETTINGS = {  # fields of `Pools`
    "chunk_tokens": ("engine", "chunk_tokens"), "max_batch": ("decode", "max_batch"),
    "itl_budget_ms": ("decode", "itl_budget_ms"), "local_tokens": ("router", "local_prefill_tokens"),
    "max_running": ("router", "max_running_requests"), "max_waiting": ("router", "max_waiting_requests"),
    "max_queued_ms": ("router", "max_prefill_queue_ms"),
}


def measured_settings(result: Result) -> Document:
    """By field of `Pools`; those that the result tells of."""
    found = {}
    settings = result.identity.get("settings") or {}
    for name, (section, key) in SETTINGS.items():
        value = (settings.get(section) or {}).get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            found[name] = value
    return found
