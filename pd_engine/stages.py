"""Where a worker's steps spend their time, by stage, and which experts they chose: of one step in every so many.

A step that is watched runs on the same engine with ops that are timed one by one; the others run as they always do.
The bits are the same: they are the same ops. Of ops that only begin their work, as on a GPU, it times the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.service.stage_names import Stage
from pd_engine.steps.decode import DecodeOutput
from pd_engine.steps.forward import Steps
from pd_engine.steps.prefill import Chunk
from pd_kernels.ops import Ops

_OF_OPS = {
    "embed": Stage.EMBED, "concat_norms": Stage.EMBED, "mla_queries": Stage.EMBED,
    "moe_gate": Stage.ROUTER,
    "moe_experts": Stage.EXPERTS, "swiglu": Stage.EXPERTS,
    "rms_norm": Stage.ATTENTION, "add_rms_norm": Stage.ATTENTION, "linear": Stage.ATTENTION,
    "latent_write": Stage.ATTENTION, "mla_attention": Stage.ATTENTION, "mla_attention_expanded": Stage.ATTENTION,
    "absorb_values": Stage.ATTENTION,
    "sample": Stage.LOGITS, "logprobs": Stage.LOGITS,
}


class StageTotals:
    """Of the watched steps of a worker's life. Written by the compute thread, read by others at any time.

    Attributes:
        seconds: by stage. What a step does besides, scheduling among it, is the rest of `step_seconds`.
        experts: tokens of each expert, a row a layer that has some, in their order, MTP's last.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_OF_OPS.values(), 0.0)
        self.num_steps = 0
        self.step_seconds = 0.0
        self.experts: list[npt.NDArray[np.int64]] = []
        self._rows: dict[int, int] = {}  # of `experts`, by the identity of a gate's weights

    def note_experts(self, gate: object, experts_TK: torch.Tensor, num_experts: int) -> None:
        row = self._rows.setdefault(id(gate), len(self._rows))
        if row == len(self.experts):
            self.experts.append(np.zeros(num_experts, dtype=np.int64))
        self.experts[row] += np.bincount(experts_TK.cpu().numpy().ravel(), minlength=num_experts)

    def loads(self) -> pb.LoadsReply:
        """Their part of a worker's report."""
        if not self.num_steps:
            return pb.LoadsReply()
        stages = [pb.StageTime(stage=stage.value, seconds=seconds) for stage, seconds in self.seconds.items()]
        return pb.LoadsReply(stages=stages, num_watched_steps=self.num_steps, watched_seconds=self.step_seconds)

    def details(self) -> pb.LoadsReply:
        """What is too much for every report."""
        return pb.LoadsReply(experts=[pb.ExpertTokens(tokens=row.tolist()) for row in list(self.experts)])


class _TimedOps:
    """Ops, each with its duration added to its stage's."""

    def __init__(self, ops: Ops, totals: StageTotals) -> None:
        self._ops = ops
        self._totals = totals
        for name, stage in _OF_OPS.items():
            setattr(self, name, self._timed(getattr(ops, name), stage))
        self.linear = self._linear
        self.moe_gate = self._moe_gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _timed(self, op: Callable[..., Any], stage: Stage) -> Callable[..., Any]:
        seconds = self._totals.seconds

        def timed(*arguments: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            result = op(*arguments, **options)
            seconds[stage] += time.perf_counter() - started_s
            return result

        return timed

    def _linear(self, x_TD: torch.Tensor, weight: Any, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The head is the one that asks for a dtype."""
        stage = Stage.ATTENTION if out_dtype is None else Stage.LOGITS
        result: torch.Tensor = self._timed(self._ops.linear, stage)(x_TD, weight, out_dtype=out_dtype)
        return result

    def _moe_gate(self, x_TD: torch.Tensor, weight: Any, bias_X: torch.Tensor, config: Any) -> Any:
        result = self._timed(self._ops.moe_gate, Stage.ROUTER)(x_TD, weight, bias_X, config)
        self._totals.note_experts(weight, result[1], len(bias_X))
        return result


@dataclass(slots=True)
class _Turns:
    every: int
    number: int = 0

    def is_next(self) -> bool:
        self.number += 1
        return self.number % self.every == 0


def watched(steps: Steps, totals: StageTotals, every: int) -> Steps:
    """The same ways into the model, one step of each kind in `every` watched. 0: none."""
    if not every:
        return steps
    views: dict[int, Engine] = {}

    def view(engine: Engine) -> Engine:
        if id(engine) not in views:
            views[id(engine)] = engine.with_ops(cast(Ops, _TimedOps(engine.ops, totals)))
        return views[id(engine)]

    def timed(started_s: float) -> None:
        totals.num_steps += 1
        totals.step_seconds += time.perf_counter() - started_s

    decode_turns, prefill_turns, first_turns = _Turns(every), _Turns(every), _Turns(every)

    def decode(engine: Engine, sequences: Seq[Sequence], max_drafts: int) -> list[DecodeOutput | Internal]:
        if not decode_turns.is_next():
            return steps.decode(engine, sequences, max_drafts)
        started_s = time.perf_counter()
        outputs = steps.decode(view(engine), sequences, max_drafts)
        timed(started_s)
        return outputs

    def prefill(engine: Engine, chunks: Seq[Chunk], on_component: Callable[[int], None]) -> None:
        if not prefill_turns.is_next():
            steps.prefill(engine, chunks, on_component)
            return
        started_s = time.perf_counter()
        steps.prefill(view(engine), chunks, on_component)
        timed(started_s)

    def sample_first(engine: Engine, sequences: Seq[Sequence]) -> list[SampledToken | Internal]:
        is_watched = first_turns.is_next()
        return steps.sample_first(view(engine) if is_watched else engine, sequences)

    return replace(steps, decode=decode, prefill=prefill, sample_first=sample_first)
