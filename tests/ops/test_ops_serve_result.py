"""Results: none without its identity, written and read again, compared; records and files that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pd_engine.contracts import api_pb2
from pd_engine.errors import InvalidArgument, NotFound
from pd_engine.model.checkpoint import DEMO_PATH
from pd_engine.settings import Settings
from pd_ops.bench.serve.about import served_by_router, serving_identity
from pd_ops.bench.serve.compare import differences, is_same_work, may_have_been_cached, measures
from pd_ops.bench.serve.plot import plot
from pd_ops.bench.serve.record import read_records, write_records
from pd_ops.bench.serve.result import new_folder, read_result
from pd_ops.bench.serve.summary import Targets, series
from pd_ops.bench.serve.text import result_text
from support.commands import run_command
from support.serve_results import LOAD, TARGETS, example, example_records, served, write_example


@pytest.mark.parametrize(("missing", "flag"), [
    ("engine", "--engine"), ("precision", "--precision"), ("max_context", "--max-context"),
    ("topology", "--topology"), ("settings", "--engine-setting"), ("checkpoint", "--checkpoint"),
])
def test_no_result_without_its_identity(missing: str, flag: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        serving_identity(served(**{missing: None}), max_new_tokens=1, sampling={})
    assert f"{missing} ({flag})" in caught.value.message


def test_a_checkpoint_elsewhere_has_no_hash() -> None:
    with pytest.raises(NotFound, match="--checkpoint PATH"):
        serving_identity(served(checkpoint="/nowhere/model"), max_new_tokens=1, sampling={})


def test_identity_has_every_part() -> None:
    identity = serving_identity(served(), max_new_tokens=7, sampling={"temperature": 0.0})
    assert identity["checkpoint"] == str(DEMO_PATH.resolve())
    assert len(identity["weights_hash"]) == len(identity["tokenizer_hash"]) == 32
    assert (identity["max_new_tokens"], identity["prefill_form"], identity["allow_rounding_reuse"]) == (
        7, "absorbed", False,
    )
    assert {"commit", "dirty", "packages", "cpu_model", "cores"} <= identity["host"].keys()


def test_a_router_tells_its_identity() -> None:
    settings = Settings.model_validate({"engine": {"latent_dtype": "fp8", "prefill_form": "expanded"}})
    workers = [
        api_pb2.WorkerStatus(role=role, host="h", ops_backend="cpu-avx2") for role in ("prefill", "decode", "decode")
    ]
    found = served_by_router(
        api_pb2.GetModelInfoResponse(model_path="m", dtype="bf16", max_context_length=10, vocab_size=5),
        api_pb2.GetServerInfoResponse(version="1", workers=workers, settings_json=settings.model_dump_json()),
    )
    assert (found.engine, found.precision, found.prefill_form) == ("pd-relay 1", "bf16, fp8 latents", "expanded")
    assert found.topology == {"prefill": 1, "decode": 2, "hosts": ["h"], "ops": ["cpu-avx2"]}
    assert found.settings is not None
    assert found.settings["engine"]["chunk_tokens"] == 256
    unready = served_by_router(api_pb2.GetModelInfoResponse(), api_pb2.GetServerInfoResponse())
    assert (unready.precision, unready.max_context, unready.settings) == (None, None, None)


def test_written_and_read_again(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "result")
    found = read_result(folder)
    assert found.records == example_records()
    assert found.document == json.loads(json.dumps(example().document | {"identity": found.identity}))
    assert read_result(folder / "result.json").targets == TARGETS
    root = ElementTree.parse(folder / "plot.svg").getroot()
    assert root.tag.endswith("svg")
    with pytest.raises(InvalidArgument, match="holds a result already"):
        new_folder(folder)


@pytest.mark.parametrize(("text", "said"), [
    ("[", "cannot be read"), ("[]", "it has no identity"), ("{}", "it has no identity, load"),
    ('{"identity": {"a": 1}, "load": {"a": 1}, "targets": {"a": 1}, "summary": {"a": 1}, "series": [1]}', "KeyError"),
])
def test_broken_results_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read_result(tmp_path)
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["{", "{}", '{"arrivals": [[1]]}', "[]", '{"arrivals": [], "outcome": "x"}'])
def test_broken_records_are_refused_by_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, example_records())
    path.write_text(path.read_text() + text)
    with pytest.raises(InvalidArgument, match="line 3"):
        read_records(path)


@pytest.mark.parametrize("change", [
    {"arrivals": [[float("nan"), 1]]}, {"arrivals": [[2.0, 1], [1.0, 1]]}, {"arrivals": [[1.0, float("inf")]]},
    {"intended_s": -1.0}, {"end_s": float("inf")}, {"prompt_tokens": "many"}, {"num_cached_tokens": True},
])
def test_records_of_no_time_or_number_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(example_records()[0].to_json() | change) + "\n")
    with pytest.raises(InvalidArgument, match="line 1"):
        read_records(path)


@pytest.mark.parametrize(("part", "change"), [
    ("summary", {"good": None}), ("summary", {"span_s": float("nan")}), ("summary", {"ttft_ms": {"p50": "soon"}}),
    ("identity", {"host": {}}), ("identity", {"sampling": None, "settings": 3, "weights_hash": 7}),
])
def test_results_without_what_is_read_of_them_are_refused(tmp_path: Path, part: str, change: dict[str, Any]) -> None:
    document = example().document
    (tmp_path / "result.json").write_text(json.dumps(document | {part: document[part] | change}))
    with pytest.raises(InvalidArgument, match="no result of bench serve"):
        read_result(tmp_path)


def test_no_result(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="bench serve --out"):
        read_result(tmp_path)


def test_compare_says_what_differs_before_what_is_faster() -> None:
    left, right = example(), example(ttft_s=0.2)
    right.document["identity"] = right.identity | {"settings": {"engine": {"chunk_tokens": 512}}}
    found = differences(left, right)
    assert [(one.name, one.left, one.right) for one in found] == [("identity.settings.engine.chunk_tokens", 256, 512)]
    assert is_same_work(found)
    rows = {row.name: row for row in measures(left, right, is_same_work=True)}
    assert rows["TTFT ms p50"].better == "left"
    assert rows["TTFT ms p50"].ratio == pytest.approx(2)
    assert rows["goodput a second"].better == "same"
    assert rows["cached share of prompts"].better is None


def test_different_work_is_never_faster() -> None:
    left, right = example(), example(load=LOAD | {"rate_per_s": 1.0})
    found = differences(left, right)
    assert not is_same_work(found)
    assert {row.better for row in measures(left, right, is_same_work=False)} == {None}
    assert not is_same_work(differences(left, example(interrupted=True)))
    other_targets = example(targets=Targets(ttft_ms=1.0).to_json())
    assert not is_same_work(differences(left, other_targets))


def test_dates_and_salt_are_no_difference_and_load_is_from_one_process_on() -> None:
    left, right = example(), example(load=LOAD | {"prompt_salt": "y"})
    host = left.identity["host"]
    for load, named in ((host["load_1m"] + 0.9, []), (host["load_1m"] + 1.1, ["identity.host.load_1m"])):
        right.document["identity"] = right.identity | {"host": host | {"date": "z", "load_1m": load}}
        assert [one.name for one in differences(left, right)] == named
        assert is_same_work(differences(left, right))


def test_the_same_prompts_twice_may_have_been_cached() -> None:
    left, right, other = example(), example(), example(load=LOAD | {"prompt_salt": "y"})
    assert not may_have_been_cached(left, right)
    for one in (right, other):
        one.document["summary"] = one.summary | {"cached_share": 0.5}
    assert may_have_been_cached(left, right)
    assert not may_have_been_cached(left, other)


def test_compare_command(tmp_path: Path) -> None:
    left, right = write_example(tmp_path / "left"), write_example(tmp_path / "right", load=LOAD | {"seed": 9})
    text = run_command("bench", "compare", left, right).stdout
    assert text.index("load.seed") < text.index("neither is faster") < text.index("TTFT ms p50")
    compared = run_command("bench", "compare", left, left, "--json").document
    assert compared["same_work"]
    assert compared["differences"] == []


def test_text_names_the_identity_first() -> None:
    text = result_text(example(interrupted=True).document)
    assert text.index("weights ") < text.index("goodput")
    assert "2 of 2 (100.0%) had TTFT <= 500 ms and mean ITL <= 100 ms" in text
    assert "interrupted" in text
    lost = example()
    errors = [{"error": "no room", "count": 1}]
    lost.document["summary"] = lost.summary | {"refused": 1, "requests": 3, "short": 2, "errors": errors}
    lost.document["load"] = LOAD | {"rate_per_s": None}
    text = result_text(lost.document)
    assert "times are of requests that finished" in text
    assert "1 x no room" in text
    assert "2 answers were shorter than asked for" in text
    assert "all at one moment" in text


def test_empty_plot_is_still_one() -> None:
    ElementTree.fromstring(plot([], series([], 0.0), Targets(), "nothing"))
