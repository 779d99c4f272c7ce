"""Times every level of a case by itself, run as the step runs it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.model.transformer import Transformer
from pd_engine.steps.sample import Place, sample_rows
from pd_kernels.ops import Ops, Rows
from pd_kernels.repeat import repeat
from pd_ops.bench.engine_rows import Kind
from pd_ops.bench.layers.levels import Level, Part
from pd_ops.bench.layers.recorded_ops import Call, Sort, by_sort, noted
from pd_ops.bench.layers.work import NEW_TOKENS, Case, Piece, Work, work

NOTHING, LAYERS, HEAD, FORWARD, SAMPLING, STEP = "nothing", "layers", "head", "forward", "sampling", "step"

PieceCall = Callable[[Piece, Rows], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks:
    """Milliseconds of one call, by the wall clock and of this process's CPU time."""

    wall_ms: float
    cpu_ms: float


class Meter:
    """The median of some rounds, in each of which every call has its turn: it is repeated until `min_s` of CPU time are
    over. What a busy machine does to one round, it does to all levels."""

    def __init__(self, *, rounds: int, min_s: float, by_cpu: bool) -> None:
        self._rounds = rounds
        self._min_s = min_s
        self.by_cpu = by_cpu

    def clocks(self, calls: Mapping[str, Call]) -> dict[str, Clocks]:
        """By the calls' names."""
        for call in calls.values():
            call()
        turns = [{name: self._turn(call) for name, call in calls.items()} for _ in range(self._rounds)]
        return {
            name: Clocks(wall_ms=statistics.median(turn[name].wall_ms for turn in turns),
                         cpu_ms=statistics.median(turn[name].cpu_ms for turn in turns))
            for name in calls
        }

    def chosen_ms(self, clocks: Clocks) -> float:
        return clocks.cpu_ms if self.by_cpu else clocks.wall_ms

    def _turn(self, call: Call) -> Clocks:
        count, wall_s, cpu_s = 0, time.perf_counter(), time.process_time()
        while not count or time.process_time() - cpu_s < self._min_s:
            call()
            count += 1
        return Clocks(wall_ms=1e3 * (time.perf_counter() - wall_s) / count,
                      cpu_ms=1e3 * (time.process_time() - cpu_s) / count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dissected:
    """`wholes_ms`: of each level by the meter's clock, of a step by the wall clock too."""

    parts: tuple[Part, ...]
    wholes_ms: dict[Level, float]
    step_wall_ms: float


def dissect(engine: Engine, case: Case, meter: Meter, chunk_tokens: int) -> Dissected:
    """All levels but the client's.

    Raises:
        InvalidArgument: the case is more than the model's context or the cache holds.
    """
    with work(engine, case, chunk_tokens) as running:
        return _Dissection(running, case, meter).run()


class _Dissection:
    def __init__(self, running: Work, case: Case, meter: Meter) -> None:
        self._work = running
        self._case = case
        self._meter = meter
        self._engine = engine = running.engine
        self._is_decode = case.kind is Kind.DECODE
        self._pieces = [running.decode_piece()] if self._is_decode else running.prompt_pieces()
        self._num_layers = engine.config.num_hidden_layers

    def run(self) -> Dissected:
        ops = self._ops()
        calls = {
            NOTHING: self._as_in_a_step(NOTHING, lambda piece, rows: None),
            LAYERS: self._as_in_a_step(LAYERS, self._layers(self._engine.ops)),
            HEAD: self._as_in_a_step(HEAD, self._head()), FORWARD: self._as_in_a_step(FORWARD, self._forward),
            SAMPLING: self._sampling(), STEP: self._work.decode if self._is_decode else self._work.read,
            **{name: self._as_in_a_step(name, run) for name, run in ops.items()},
        }
        clocks = self._meter.clocks(calls)
        ms = {name: self._meter.chosen_ms(one) for name, one in clocks.items()}
        dispatch_ms = ms[NOTHING]
        alone = {name: max(0.0, one_ms - dispatch_ms) for name, one_ms in ms.items()}
        layer_ms = alone[LAYERS] / self._num_layers
        return Dissected(
            parts=(
                *(Part(level=Level.OP, name=name, ms=alone[name] / self._num_layers) for name in ops),
                Part(level=Level.LAYER, name="layer", ms=layer_ms, count=self._num_layers),
                Part(level=Level.LAYER, name=HEAD, ms=alone[HEAD]),
                Part(level=Level.LAYER, name="dispatch", ms=dispatch_ms),
                Part(level=Level.FORWARD, name=FORWARD, ms=ms[FORWARD]),
                Part(level=Level.FORWARD, name=SAMPLING, ms=ms[SAMPLING]),
            ),
            step_wall_ms=clocks[STEP].wall_ms,
            wholes_ms={Level.LAYER: layer_ms, Level.FORWARD: ms[FORWARD], Level.STEP: ms[STEP]},
        )

    def _ops(self) -> dict[str, PieceCall]:
        """By sort: its calls in all layers, made in the order of the layers, so that their weights come from where they
        come from in a step."""
        calls = [
            by_sort(noted(self._engine.ops, lambda ops, piece=piece: self._layers(ops)(piece, piece.step.rows)))  # type: ignore[misc]
            for piece in self._pieces
        ]
        number = {id(piece): index for index, piece in enumerate(self._pieces)}

        def again(sort: Sort) -> PieceCall:
            def run(piece: Piece, rows: Rows) -> None:
                for call in calls[number[id(piece)]][sort]:
                    call()

            return run

        return {sort.value: again(sort) for sort in calls[0]}

    def _layers(self, ops: Ops) -> PieceCall:
        """Each layer as a model of its own: the embedding and the final norm, which come with it, are little."""
        main = self._engine.main
        alone = [
            Transformer(
                main.config, replace(main.weights, layers=(weights,)), ops, self._case.tokens + NEW_TOKENS,
                self._engine.dtype,
            )
            for weights in main.weights.layers
        ]

        def run(piece: Piece, rows: Rows) -> None:
            for model, cache in zip(alone, self._engine.main_caches, strict=True):
                model.forward(piece.ids_T, replace(piece.step, rows=rows), [cache])

        return run

    def _forward(self, piece: Piece, rows: Rows) -> None:
        """With logits of all rows of a decode step, and of the last one of a prompt."""
        main = self._engine.main
        hidden_TD = main.forward(piece.ids_T, replace(piece.step, rows=rows), self._engine.main_caches)
        if self._is_decode:
            main.logits(hidden_TD)
        elif piece is self._pieces[-1]:
            main.logits(hidden_TD[-1:])

    def _head(self) -> PieceCall:
        last = self._pieces[-1]
        hidden_TD = self._hidden(last)

        def run(piece: Piece, rows: Rows) -> None:
            if piece is last:
                self._engine.main.logits(hidden_TD)

        return run

    def _hidden(self, piece: Piece) -> Tensor:
        """Of the rows that logits are needed of."""
        hidden_TD = self._engine.main.forward(piece.ids_T, piece.step, self._engine.main_caches)
        return hidden_TD if self._is_decode else hidden_TD[-1:].clone()

    def _sampling(self) -> Call:
        logits_TZ = self._engine.main.logits(self._hidden(self._pieces[-1])).clone()
        places = [Place(choice) for choice in self._work.choices]
        return lambda: sample_rows(self._engine.ops, logits_TZ, places)

    def _as_in_a_step(self, name: str, run: PieceCall) -> Call:
        """A decode step's few rows are recorded and repeated, a prompt's chunks are not."""
        if not self._is_decode:
            return lambda: [run(piece, piece.step.rows) for piece in self._pieces]
        [piece] = self._pieces

        def recorded(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
            run(piece, rows)
            return ()

        unique = f"bench layers: {self._case.text}: {name}"
        return lambda: repeat(self._engine.ops, unique, recorded, (piece.ids_T,), piece.step.rows)
