"""This project's engine as a measured process: `python -m pd_ops.bench.engine_process OPTIONS`.

It runs the steps that the workers run (`pd_engine.steps`), and takes apart where a decode step's time goes: the model's
forward (main layers, MTP layer, heads), sampling, and everything else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pd_engine.engine import Engine
from pd_engine.sampling.params import NO_TOP_K, SamplingParams
from pd_engine.sequence import Sequence as Choice
from pd_engine.settings import EngineSettings
from pd_engine.steps import decode, draft
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_ops.bench.measured_process import Document, Stopwatch, Timed, serve

MODEL, MODEL_CALLS, SAMPLING = "model_s", "num_model_calls", "sampling_s"


class _Drafting:
    """`draft_tokens`, and what it has taken so far."""

    wall_s = 0.0
    cpu_s = 0.0

    def __call__(self, engine: Engine, sequences: Sequence[Choice], max_drafts: int) -> list[list[int]]:
        with Stopwatch() as watch:
            drafts = draft.draft_tokens(engine, sequences, max_drafts)
        self.wall_s += watch.wall_s
        self.cpu_s += watch.cpu_s
        return drafts


class EngineProcess:
    """Options: model (folder), dtype, ops, threads, cache_mib, temperature."""

    def __init__(self, options: Document) -> None:
        settings = EngineSettings(
            dtype=options["dtype"], ops=options["ops"], threads=options["threads"], cache_mib=options["cache_mib"]
        )
        self._engine = engine = Engine.load(Path(options["model"]), settings, max_speculate=1)
        self._chunk_tokens = settings.chunk_tokens
        self._temperature = float(options["temperature"])
        self._sums = dict.fromkeys((MODEL, MODEL_CALLS, SAMPLING), 0.0)
        self._is_timed = False
        # A step calls the model itself, or repeats the ops that an earlier one has recorded.
        for owner, name in ((engine.main, "forward"), (engine.main, "logits"), (engine.mtp, "forward"),
                            (engine.mtp, "write_slots"), (decode, "repeat"), (draft, "repeat")):
            if owner is not None:
                self._time(owner, name, MODEL)
        self._time(engine.ops, "sample", SAMPLING)

    def describe(self) -> Document:
        engine = self._engine
        return {
            "name": "pd-relay", "fingerprint": engine.fingerprint, "ops": engine.ops.name,
            "numerics": engine.ops.numerics, "has_mtp": engine.has_mtp, "num_parameters": engine.num_parameters,
            "max_context_length": engine.max_context_length, "vocab_size": engine.config.vocab_size,
            "num_slots": engine.pool.num_blocks * engine.layout.block_size,
            "load_seconds": round(engine.load_seconds, 3),
        }

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        [choice] = self._choices([prompt], num_tokens, speculate=0)
        try:
            self._read(choice)
            while choice.num_generated < num_tokens:
                decode.decode_step(self._engine, [choice])
            return choice.generated_ids[:num_tokens]
        finally:
            self._release([choice])

    def prefill(self, prompt: Sequence[int]) -> Timed:
        [choice] = self._choices([prompt], 0, speculate=0)
        try:
            with Stopwatch() as watch:
                self._read(choice)
        finally:
            self._release([choice])
        return Timed(num_tokens=len(prompt), wall_s=watch.wall_s, cpu_s=watch.cpu_s)

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int, speculate: int) -> Timed:
        """Without drafts, `num_steps` steps; with drafts, as many as give as many tokens: contexts become as long."""
        choices = self._choices(prompts, num_steps, speculate=speculate)
        num_wanted, num_tokens, num_taken = num_steps * len(choices), 0, 0
        drafting = _Drafting()
        setattr(decode, "draft_tokens", drafting)  # noqa: B010
        try:
            for choice in choices:
                self._read(choice)
            self._sums.update(dict.fromkeys(self._sums, 0.0))
            with Stopwatch() as watch:
                while num_tokens < num_wanted:
                    outputs = decode.decode_step(self._engine, choices)
                    num_tokens += sum(len(output.tokens) for output in outputs)
                    num_taken += 1
            parts = {
                **self._sums, "num_steps": float(num_taken),
                "num_drafted": float(sum(choice.num_drafted for choice in choices)),
                "num_accepted": float(sum(choice.num_accepted for choice in choices)),
                "step_draft_wall_s": drafting.wall_s, "step_draft_cpu_s": drafting.cpu_s,
            }
        finally:
            setattr(decode, "draft_tokens", draft.draft_tokens)  # noqa: B010
            self._release(choices)
        if speculate:
            parts |= self._parts_alone(prompts, num_taken, speculate, [choice.token_ids for choice in choices])
        return Timed(num_tokens=num_tokens, wall_s=watch.wall_s, cpu_s=watch.cpu_s, parts=parts)

    def _parts_alone(
        self, prompts: Sequence[Sequence[int]], num_steps: int, speculate: int, answers: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """The seconds of as many steps that verify drafts which cost nothing, and of drafts that nobody verifies, made
        half-way through the answers.

        Args:
            answers: what the prompts became: the drafts that are verified, so that contexts grow as they did.
        """
        choices = self._choices(prompts, num_steps, speculate=speculate)

        def known(engine: Engine, sequences: Sequence[Choice], max_drafts: int) -> list[list[int]]:
            return [
                [*answer[each.num_tokens : each.num_tokens + speculate], *[0] * speculate][:speculate]
                for each, answer in zip(sequences, answers, strict=True)
            ]

        def verify(count: int) -> Stopwatch:
            with Stopwatch() as watch:
                for _ in range(count):
                    decode.decode_step(self._engine, choices)
            return watch

        setattr(decode, "draft_tokens", known)  # noqa: B010
        try:
            for choice in choices:
                self._read(choice)
            halves = [verify(num_steps // 2)]
            drafting = self._draft_alone(choices, num_steps, speculate)
            halves.append(verify(num_steps - num_steps // 2))
        finally:
            setattr(decode, "draft_tokens", draft.draft_tokens)  # noqa: B010
            self._release(choices)
        return {
            "draft_wall_s": drafting.wall_s, "draft_cpu_s": drafting.cpu_s,
            "verify_wall_s": sum(half.wall_s for half in halves), "verify_cpu_s": sum(half.cpu_s for half in halves),
        }

    def _draft_alone(self, choices: Sequence[Choice], num_steps: int, speculate: int) -> Stopwatch:
        """The same drafts again and again, each time as after a step that accepted all it could."""
        waiting = []
        for choice in choices:
            assert choice.pending_hidden is not None
            waiting.append((choice.num_tokens - len(choice.pending_hidden), choice.pending_hidden))
        with Stopwatch() as watch:
            for _ in range(num_steps):
                for choice, (num_computed_mtp, pending) in zip(choices, waiting, strict=True):
                    choice.num_computed_mtp, choice.pending_hidden = num_computed_mtp, pending
                draft.draft_tokens(self._engine, choices, speculate)
        return watch

    def _choices(self, prompts: Sequence[Sequence[int]], num_steps: int, *, speculate: int) -> list[Choice]:
        """With blocks for all that so many steps can give."""
        most = num_steps * (1 + speculate) + speculate + 1
        choices = []
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=self._temperature, top_p=1.0, top_k=NO_TOP_K, seed=number, max_tokens=most, ignore_eos=True
            )
            name = f"bench {number}"
            num_blocks = self._engine.layout.num_blocks_for(len(prompt) + most)
            choices.append(Choice(
                name=name, token_ids=list(prompt), num_prompt_tokens=len(prompt), params=params,
                ending_ids=frozenset(), speculate=speculate, block_ids=self._engine.pool.allocate(num_blocks, name),
            ))
        return choices

    def _read(self, choice: Choice) -> None:
        """Its prompt, in chunks as a worker does it, and the first token."""
        while choice.num_computed < choice.num_prompt_tokens:
            count = min(self._chunk_tokens, choice.num_prompt_tokens - choice.num_computed)
            prefill_step(self._engine, [Chunk(sequence=choice, num_tokens=count)])
        sample_first(self._engine, [choice])

    def _release(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._engine.pool.release(choice.block_ids, choice.name)

    def _time(self, owner: object, name: str, part: str) -> None:
        """From here on the calls of a function count into `part`, unless they are within another timed one."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_timed:
                return function(*args, **kwargs)
            self._is_timed = True
            began_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._sums[part] += time.perf_counter() - began_s
                self._sums[MODEL_CALLS] += part == MODEL
                self._is_timed = False

        setattr(owner, name, timed)


if __name__ == "__main__":
    sys.exit(serve(EngineProcess))
