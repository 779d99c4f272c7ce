"""The ways into a model that workers use, and the clock that their durations are taken by."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.steps.decode import DecodeOutput, try_decode_step
from pd_engine.steps.draft import catch_up
from pd_engine.steps.prefill import Chunk, prefill_step, try_sample_first


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Each with the arguments and results of the function that is its default; of `decode` the last argument is the
    most drafts of a sequence, of `catch_up` those that have ended."""

    prefill: Callable[[Engine, Seq[Chunk], Callable[[int], None]], None] = prefill_step
    sample_first: Callable[[Engine, Seq[Sequence]], list[SampledToken | Internal]] = try_sample_first
    decode: Callable[[Engine, Seq[Sequence], int], list[DecodeOutput | Internal]] = try_decode_step
    catch_up: Callable[[Engine, Seq[Sequence], Seq[Sequence]], None] = catch_up
    clock: Callable[[], float] = time.perf_counter


THE_MODEL = Steps()
