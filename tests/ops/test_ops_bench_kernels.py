"""`kernels list` and `kernels measure`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pd_kernels
from pd_engine.errors import FailedPrecondition, NotFound
from pd_ops.bench.kernel_list import FIGURES, Figure, list_ops, ops_text, read_figures
from pd_ops.bench.kernel_roofline import read_roofline, roofline_text
from support.commands import run_command
from support.kernel_ops import names

FOLDER = Path(pd_kernels.__file__).parent


def test_every_op_with_a_reference_is_listed() -> None:
    entries = {entry.op: entry for entry in list_ops([])}
    assert set(entries) == {path.parent.name for path in FOLDER.glob("*/reference.py")}
    assert all(entry.dtypes and entry.implementations[0].name == "reference" for entry in entries.values())
    usable = {one.name for one in entries["linear"].implementations if one.usable}
    assert set(names()) <= usable
    assert "triton" in [one.name for one in entries["mla_attention"].implementations]


def test_figures_belong_to_their_op(tmp_path: Path) -> None:
    figures = [
        Figure(op="linear", implementation=name, dtype="bf16", case="tiny", num_rows=count, microseconds=time)
        for name, count, time in (("reference", 1, 90.0), ("cpu-avx2", 1, 12.0), ("reference", 16, 300.0))
    ]
    entries = list_ops(figures)
    assert [len(entry.measured) for entry in entries if entry.op == "linear"] == [3]
    assert sum(len(entry.measured) for entry in entries) == 3
    text = ops_text(entries)
    assert "1 rows 12.0 µs (cpu-avx2); 16 rows 300.0 µs (reference)" in text
    assert "not measured" in text


def test_a_broken_file_of_figures_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert read_figures(file) == ({}, [])
    file.write_text('{"identity": {}, "figures": [{"op": "linear"}]}', encoding="utf-8")
    with pytest.raises(FailedPrecondition, match="holds no figures"):
        read_figures(file)


def test_measured_and_then_listed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    finished = run_command("kernels", "measure", "--rows", "2", "--dtype", "fp32", "--output", file, "--json")
    assert finished.code == 0, finished.stderr
    figures = finished.document["figures"]
    assert finished.document == json.loads(file.read_text(encoding="utf-8"))
    assert {figure["implementation"] for figure in figures} == set(names())
    assert all(figure["microseconds"] > 0 and figure["num_rows"] == 2 for figure in figures)
    listed = run_command("kernels", "list", "--figures", file, "--json").document
    known = {entry["op"] for entry in listed["ops"]}
    assert {figure["op"] for figure in figures} <= known
    assert {entry["op"] for entry in listed["ops"] if entry["measured"]} == {figure["op"] for figure in figures}
    assert set(listed["ops"][0]) == {"op", "uses", "implementations", "usable_here", "dtypes", "measured"}


def test_the_roofline_is_listed(tmp_path: Path) -> None:
    listed = run_command("kernels", "list", "--roofline", "--json").document["roofline"]
    assert {"mla_decode", "mla_prefill", "grouped_gemm", "rms_norm"} <= {row["op"] for row in listed["rows"]}
    names = {name for entry in list_ops([]) for name in (entry.op, *entry.to_json()["uses"])}
    assert {row["op"] for row in listed["rows"]} <= names
    assert all(row["floor_us"] > 0 and row["bound_by"] in ("memory", "compute") for row in listed["rows"])
    text = roofline_text(listed)
    if listed["measured_on"] is None:
        assert text.count("not measured") == len(listed["rows"])
    first = listed["rows"][0] | {"measured_us": 2 * listed["rows"][0]["floor_us"], "share": 0.5}
    assert "50%" in roofline_text({"rows": [first]})
    broken = tmp_path / "roofline.json"
    with pytest.raises(NotFound, match="in a checkout only"):
        read_roofline(broken)
    broken.write_text('{"rows": [{}]}', encoding="utf-8")
    with pytest.raises(FailedPrecondition, match="holds no roofline"):
        read_roofline(broken)


def test_the_committed_figures_can_be_read() -> None:
    identity, figures = read_figures(FIGURES)
    assert identity["commit"]
    assert figures
