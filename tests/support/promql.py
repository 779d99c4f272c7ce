"""Which metrics and labels a PromQL expression speaks of: enough of the language for our own dashboards and alerts."""

from __future__ import annotations

import re

WORDS = frozenset({
    "and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset", "sum",
    "max", "min", "avg", "count", "rate", "increase", "histogram_quantile", "vector", "min_over_time", "max_over_time",
    "le", "label_values", "absent", "topk", "clamp_min",
})
_STRING = re.compile(r'"[^"]*"')
_MATCHERS = re.compile(r"\{([^}]*)\}")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_NUMBER = re.compile(r"\b\d+(\.\d+)?(e\d+)?\b")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def metrics_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """Names of series, and of labels that are matched or grouped by."""
    text = _RANGE.sub("", _STRING.sub('""', expression))
    labels = {name for group in [*_MATCHERS.findall(text), *_LABELS.findall(text)] for name in _NAME.findall(group)}
    text = _NUMBER.sub("", _LABELS.sub("", _MATCHERS.sub("", text)))
    return {name for name in _NAME.findall(text) if name not in WORDS}, labels
