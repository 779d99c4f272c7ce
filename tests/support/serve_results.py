"""A result of bench serve, made up: two good requests of the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pd_ops.bench.serve.about import Served, serving_identity
from pd_ops.bench.serve.plot import plot
from pd_ops.bench.serve.record import Outcome, Record
from pd_ops.bench.serve.result import RESULT_FILE, Result, new_folder, write_result
from pd_ops.bench.serve.summary import Targets, series, summarize

LOAD = {
    "source": "kinds", "trace": None, "kinds": ["short"], "skip": 0, "requests": 2, "seed": 0, "loop": "open",
    "concurrency": None, "arrivals": "poisson", "rate_per_s": 2.0, "length_scale": 1.0, "num_clipped": 0,
    "prompt_tokens": 20, "output_tokens": 6, "shared_block_share": 0.0, "prompt_salt": "x",
}
TARGETS = Targets(ttft_ms=500.0, itl_ms=100.0)


def served(**fields: Any) -> Served:
    known: dict[str, Any] = {
        "engine": "pd-relay 0.1.0", "checkpoint": "demo", "precision": "bf16", "max_context": 4096, "vocab_size": 4096,
        "topology": {"prefill": 1, "decode": 1}, "settings": {"engine": {"chunk_tokens": 256}},
        "prefill_form": "absorbed",
    }
    return Served(**(known | fields))


def example_records(ttft_s: float = 0.1) -> tuple[Record, ...]:
    return tuple(
        Record(
            number=number, kind="short", intended_s=float(number), sent_s=float(number), end_s=number + 1.0,
            outcome=Outcome.FINISHED, prompt_tokens=10, asked_tokens=3,
            arrivals=((number + ttft_s, 1), (number + ttft_s + 0.05, 2)), num_cached_tokens=0,
        )
        for number in range(2)
    )


def example(ttft_s: float = 0.1, *, span_s: float = 2.0, **fields: Any) -> Result:
    """`fields` stand over those of its document."""
    records = example_records(ttft_s)
    identity = serving_identity(served(), max_new_tokens=3, sampling={"temperature": 0.0})
    document = {
        "identity": identity, "load": LOAD, "targets": TARGETS.to_json(), "series": series(records, span_s),
        "pools": [], "summary": summarize(records, TARGETS, span_s=span_s), "interrupted": False, **fields,
    }
    return Result(path=Path("example"), document=document, records=records)


def write_example(folder: Path, **fields: Any) -> Path:
    made = example(**fields)
    picture = plot(made.records, made.document["series"], TARGETS, "a <title>")
    write_result(new_folder(folder), made.document, made.records, picture)
    assert (folder / RESULT_FILE).is_file()
    return folder
