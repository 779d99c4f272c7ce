"""llama.cpp as a measured process, through its C interface.

A checkpoint is converted first (`llama_cpp_convert.py`, by the interpreter of pd-relay, which has torch and
transformers). Flash attention is tried with and without, for each case, and the quicker one taken.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import llama_cpp
import numpy as np

from pd_ops.bench.measured_process import Document, Stopwatch, Timed, serve

OUT_TYPES = {"bf16": "bf16", "fp32": "f32"}
BATCH_TOKENS = 512
CONVERTER = Path(__file__).with_name("llama_cpp_convert.py")
SOURCE = Path(sys.prefix) / "source" / "vendor" / "llama.cpp"


class LlamaPeer:
    def __init__(self, options: Document) -> None:
        file = Path(options["work_directory"]) / f"{Path(options['model']).name}-{options['dtype']}.gguf"
        if not file.exists():
            subprocess.run(
                [options["converter_python"], str(CONVERTER), str(SOURCE), options["model"], str(file),
                 OUT_TYPES[options["dtype"]]],
                check=True,
            )
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._options = options
        self._contexts: dict[tuple[bool, int], Any] = {}
        self._chosen: dict[tuple[str, int], bool] = {}

    def describe(self) -> Document:
        return {"name": "llama-cpp", "version": llama_cpp.__version__}

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        context = self._context(False, 1)
        self._read(context, [prompt])
        tokens = [self._best(context)]
        while len(tokens) < num_tokens:
            self._run(context, [(tokens[-1], len(prompt) + len(tokens) - 1, 0, True)])
            tokens.append(self._best(context))
        return tokens

    def prefill(self, prompt: Sequence[int]) -> Timed:
        def run(flash: bool) -> Timed:
            context = self._context(flash, 1)
            with Stopwatch() as watch:
                self._read(context, [prompt])
            return Timed(num_tokens=len(prompt), wall_s=watch.wall_s, cpu_s=watch.cpu_s)

        return self._quickest(("prefill", 1), run)

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int, speculate: int) -> Timed:
        def run(flash: bool) -> Timed:
            context = self._context(flash, len(prompts))
            self._read(context, prompts)
            with Stopwatch() as watch:
                for step in range(num_steps):
                    self._run(context, [
                        (prompt[step % len(prompt)], len(prompt) + step, number, True)
                        for number, prompt in enumerate(prompts)
                    ])
            return Timed(num_tokens=len(prompts) * num_steps, wall_s=watch.wall_s, cpu_s=watch.cpu_s)

        return self._quickest(("decode", len(prompts)), run)

    def _quickest(self, case: tuple[str, int], run: Callable[[bool], Timed]) -> Timed:
        if case not in self._chosen:
            seconds = {flash: min(run(flash).cpu_s for _ in range(2)) for flash in (False, True)}
            self._chosen[case] = seconds[True] < seconds[False]
            print(f"{case}: flash attention {self._chosen[case]}, {seconds}", flush=True)
        return run(self._chosen[case])

    def _context(self, flash: bool, num_sequences: int) -> Any:
        """An empty context for so many sequences."""
        key = (flash, num_sequences)
        if key not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = num_sequences * min(self._options["max_length"] + 8, 256 if num_sequences > 1 else 1 << 20)
            params.n_batch, params.n_ubatch, params.n_seq_max = 2048, BATCH_TOKENS, num_sequences
            params.n_threads = params.n_threads_batch = self._options["threads"]
            params.flash_attn_type = int(flash)
            params.kv_unified = True
            context = llama_cpp.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
            self._contexts[key] = context
        context = self._contexts[key]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        return context

    def _read(self, context: Any, prompts: Sequence[Sequence[int]]) -> None:
        """All prompts, a batch at a time; logits of each one's last token."""
        rows = [
            (token, position, number, position == len(prompt) - 1)
            for number, prompt in enumerate(prompts) for position, token in enumerate(prompt)
        ]
        for start in range(0, len(rows), 2048):
            self._run(context, rows[start : start + 2048])

    def _run(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One batch of (token, position, sequence, whether its logits are wanted)."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, int(wanted)
        result = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_synchronize(context)
        llama_cpp.llama_batch_free(batch)
        if result:
            raise RuntimeError(f"llama_decode returned {result}")

    def _best(self, context: Any) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    sys.exit(serve(LlamaPeer))
