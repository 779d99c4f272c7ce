"""`bench layers`: the sums, the calls that are made again, and a run on a tiny model; never speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.settings import EngineSettings
from pd_ops.bench.engine_rows import Kind
from pd_ops.bench.layers.client_level import shared_itl_ms
from pd_ops.bench.layers.levels import Level, Part, explained, rows, rows_text
from pd_ops.bench.layers.recorded_ops import Sort, by_sort, noted
from pd_ops.bench.layers.work import Case, work
from pd_ops.commands.bench_layers import PAGE_NOTE
from pd_ops.latency import StreamTiming
from support.commands import run_command

PARTS = (
    Part(level=Level.STEP, name="decode step", ms=8.0), Part(level=Level.LAYER, name="head", ms=1.0),
    Part(level=Level.OP, name="GEMM", ms=0.5), Part(level=Level.OP, name="attention", ms=0.25),
    Part(level=Level.LAYER, name="layer", ms=1.0, count=4), Part(level=Level.FORWARD, name="forward", ms=6.0),
)
WHOLES = {Level.LAYER: 1.0, Level.FORWARD: 6.0, Level.STEP: 8.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers") / "model"
    write_random_checkpoint(path, {"num_hidden_layers": 2}, seed=5)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.load(model, EngineSettings(cache_mib=16, chunk_tokens=8), max_speculate=0)


def test_shares_are_of_the_next_level() -> None:
    found = rows("a case", PARTS, WHOLES)
    shares = {row.part: row.share for row in found}
    assert [row.level for row in found] == ["op", "op", "layer", "layer", "forward", "step"]
    assert shares["GEMM"] == 0.5
    assert shares["layer"] == pytest.approx(4 / 6)
    assert shares["forward"] == 0.75
    assert shares["decode step"] is None  # nobody has measured what a client waits
    assert explained(found) == {
        ("a case", "layer"): 0.75, ("a case", "forward"): pytest.approx(5 / 6), ("a case", "step"): 0.75,
    }


def test_what_is_not_explained_is_said() -> None:
    lines = rows_text(rows("a case", PARTS, {**WHOLES, Level.CLIENT: 10.0})).splitlines()
    assert [line.split()[-4] for line in lines if "(the rest)" in line] == ["25.0%", "16.7%", "25.0%", "20.0%"]


def test_every_op_of_a_layer_is_noted_and_can_be_called_again(engine: Engine) -> None:
    with work(engine, Case(kind=Kind.DECODE, batch=3, tokens=20), 8) as running:
        piece = running.decode_piece()
        assert piece.ids_T.shape == (3,)
        sorts = by_sort(noted(engine.ops, lambda ops: ops.embed(piece.ids_T, engine.main.weights.embedding_ZD)))
        assert list(sorts) == [Sort.NORMS]
        [call] = sorts[Sort.NORMS]
        assert (call() == engine.main.weights.embedding_ZD[piece.ids_T]).all()  # type: ignore[attr-defined]


def test_a_step_may_be_run_again_and_leaves_its_sequences_as_they_were(engine: Engine) -> None:
    free = engine.pool.num_free
    with work(engine, Case(kind=Kind.DECODE, batch=2, tokens=20), 8) as running:
        before = [list(choice.token_ids) for choice in running.choices]
        for _ in range(3):
            running.decode()
        assert [choice.token_ids for choice in running.choices] == before
        assert [choice.num_computed for choice in running.choices] == [20, 20]
    with work(engine, Case(kind=Kind.PREFILL, batch=1, tokens=20), 8) as running:
        assert [len(piece.ids_T) for piece in running.prompt_pieces()] == [8, 8, 4]
    assert engine.pool.num_free == free


@pytest.mark.parametrize(("batch", "tokens", "sentence"), [(1, 10**6, "context is"), (10**4, 1000, "blocks of")])
def test_more_than_there_is_room_for(engine: Engine, batch: int, tokens: int, sentence: str) -> None:
    with (
        pytest.raises(InvalidArgument, match=sentence),
        work(engine, Case(kind=Kind.DECODE, batch=batch, tokens=tokens), 8),
    ):
        pass


def test_time_between_tokens_counts_only_while_all_streams_run() -> None:
    """One is there early, the other stays longer: between 1 s and 2 s both give a token every 50 ms."""
    early = StreamTiming(start=0.0, arrivals=tuple((0.05 * n, 1) for n in range(41)))
    late = StreamTiming(start=0.0, arrivals=tuple((1 + 0.05 * n, 1) for n in range(60)))
    assert shared_itl_ms([early, late]) == pytest.approx(50.0, rel=0.05)
    apart = StreamTiming(start=0.0, arrivals=((2.0, 1), (3.0, 1)))
    assert shared_itl_ms([early, apart]) is None


QUICK = ("--batch", "2", "--context-tokens", "20", "--prompt-tokens", "300", "--rounds", "1", "--min-seconds", "0")


def levels_by_case(document: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in document["rows"]:
        found.setdefault(row["case"], []).append(row["level"])
    return {case: list(dict.fromkeys(levels)) for case, levels in found.items()}


def test_a_run_has_all_levels_of_every_case(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "layers.md"
    finished = run_command("bench", "layers", "--model", model, *QUICK, "--requests", "0", "--page", page, "--json")
    assert finished.code == 0, finished.stderr
    document = finished.document
    assert levels_by_case(document) == {
        "decode, batch 2, context 20": ["op", "layer", "forward", "step"],
        "prompt of 300": ["op", "layer", "forward", "step"],
    }
    for row in document["rows"]:
        assert row["ms"] >= 0
        assert row["share"] is None or row["level"] != "step"
    shared = {row["level"] for row in document["rows"] if row["share"] is not None}
    assert shared == {"op", "layer", "forward"}  # of rows not all: in one round a layer may take no more than its call
    assert {row["part"] for row in document["rows"]} >= {"GEMM", "attention", "router", "experts", "head", "sampling"}
    assert len(document["explained"]) == 6
    assert f"fingerprint {document['fingerprint']}" in page.read_text()
    assert f"\n{PAGE_NOTE}\n" in page.read_text()
    assert document["interrupted"] is False


@pytest.mark.slow
def test_what_clients_wait_is_the_last_level(model: Path) -> None:
    finished = run_command(
        "bench", "layers", "--model", model, *QUICK, "--requests", "1", "--json", timeout_s=280.0
    )
    assert finished.code == 0, finished.stderr
    assert {levels[-1] for levels in levels_by_case(finished.document).values()} == {"client"}
