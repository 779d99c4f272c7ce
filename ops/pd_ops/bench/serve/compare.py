"""Two results beside each other: first in what they are not the same thing, then which is faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pd_ops.bench.serve.about import flat
from pd_ops.bench.serve.result import Result
from pd_ops.output import Document

# Differ between any two runs, and say nothing about what was measured.
IGNORED = frozenset({"host.date", "prompt_salt"})
LOAD, OTHER_LOAD = "host.load_1m", 1.0  # processes of others; less is chance
MEASURES = (
    ("goodput a second", ("goodput_per_s",), True), ("good share", ("good_share",), True),
    ("requests a second", ("requests_per_s",), True), ("output tokens a second", ("completion_tokens_per_s",), True),
    ("refused", ("refused",), False), ("failed", ("failed",), False),
    *((f"{name} {rank}", (key, rank), False) for name, key in (("TTFT ms", "ttft_ms"), ("ITL ms", "itl_ms"))
      for rank in ("p50", "p95", "p99")),
    ("request ms p50", ("request_ms", "p50"), False), ("answers shorter than asked", ("short",), False),
    ("cached share of prompts", ("cached_share",), None),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """None: one of them does not have it."""

    name: str
    left: Any
    right: Any

    def to_json(self) -> Document:
        return {"name": self.name, "left": self.left, "right": self.right}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """`ratio`: right to left; None where there is none. `better`: "left", "right" or "same"; None: cannot be said."""

    name: str
    left: float | None
    right: float | None
    more_is_better: bool | None

    @property
    def ratio(self) -> float | None:
        return self.right / self.left if self.left and self.right is not None else None

    @property
    def better(self) -> str | None:
        if self.left is None or self.right is None or self.more_is_better is None:
            return None
        if self.left == self.right:
            return "same"
        return "right" if (self.right > self.left) == self.more_is_better else "left"

    def to_json(self) -> Document:
        return {"name": self.name, "left": self.left, "right": self.right, "ratio": self.ratio, "better": self.better}


def differences(left: Result, right: Result) -> list[Difference]:
    """Of identities, loads and targets, by name."""
    found = []
    for part in ("identity", "load", "targets"):
        ours, theirs = flat(left.document[part]), flat(right.document[part])
        found += [
            Difference(name=f"{part}.{name}", left=ours.get(name), right=theirs.get(name))
            for name in sorted(ours.keys() | theirs.keys())
            if name not in IGNORED and ours.get(name) != theirs.get(name)
            and not (name == LOAD and _is_near(ours.get(name), theirs.get(name)))
        ]
    if left.document.get("interrupted") != right.document.get("interrupted"):
        found.append(Difference(name="interrupted", left=left.document.get("interrupted"),
                                right=right.document.get("interrupted")))
    return found


def _is_near(left: object, right: object) -> bool:
    return isinstance(left, int | float) and isinstance(right, int | float) and abs(left - right) < OTHER_LOAD


def may_have_been_cached(left: Result, right: Result) -> bool:
    """The same prompts were sent twice, and one run found more of them cached."""
    salts = [one.document["load"].get("prompt_salt") for one in (left, right)]
    shares = [one.summary.get("cached_share") for one in (left, right)]
    return salts[0] is not None and salts[0] == salts[1] and shares[0] != shares[1]


def measures(left: Result, right: Result, *, is_same_work: bool) -> list[Measure]:
    """Of different work none is better."""
    return [
        Measure(name=name, left=_at(left.summary, keys), right=_at(right.summary, keys),
                more_is_better=more if is_same_work else None)
        for name, keys, more in MEASURES
    ]


def is_same_work(found: list[Difference]) -> bool:
    """The same requests at the same times for the same targets; otherwise no figure is faster than another."""
    return not any(one.name.startswith(("load.", "targets.")) or one.name == "interrupted" for one in found)


def _at(document: Document, keys: tuple[str, ...]) -> float | None:
    found: Any = document
    for key in keys:
        found = found[key] if isinstance(found, dict) and key in found else None
    return None if found is None else float(found)
