"""transformers as a measured process. Decoding is the leanest loop over its model: no `generate` around it.

Of its implementations of the experts the quickest is taken, for each case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from pd_ops.bench.measured_process import Document, Stopwatch, Timed, serve

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXPERTS = ("eager", "batched_mm", "grouped_mm")


class TransformersPeer:
    def __init__(self, options: Document) -> None:
        torch.set_num_threads(options["threads"])
        torch.set_grad_enabled(False)
        config = AutoConfig.from_pretrained(options["model"])
        # It does not load MTP layers, and complains about those that it does not know by number.
        mtp = rf"model\.layers\.{config.num_hidden_layers}\..*"
        modeling_deepseek_v3.DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = [mtp]
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=DTYPES[options["dtype"]]).eval()
        self._chosen: dict[tuple[str, int], str] = {}

    def describe(self) -> Document:
        return {"name": "transformers", "version": transformers.__version__, "torch": torch.__version__}

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        self._model.set_experts_implementation("eager")
        cache, token = self._read([prompt])
        tokens = [int(token)]
        while len(tokens) < num_tokens:
            token = self._step(token, cache)
            tokens.append(int(token))
        return tokens

    def prefill(self, prompt: Sequence[int]) -> Timed:
        def run() -> Timed:
            with Stopwatch() as watch:
                self._read([prompt])
            return Timed(num_tokens=len(prompt), wall_s=watch.wall_s, cpu_s=watch.cpu_s)

        return self._quickest(("prefill", 1), run)

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int, speculate: int) -> Timed:
        def run() -> Timed:
            cache, token = self._read(prompts)
            with Stopwatch() as watch:
                for _ in range(num_steps):
                    token = self._step(token, cache)
            return Timed(num_tokens=len(prompts) * num_steps, wall_s=watch.wall_s, cpu_s=watch.cpu_s)

        return self._quickest(("decode", len(prompts)), run)

    def _quickest(self, case: tuple[str, int], run: Callable[[], Timed]) -> Timed:
        """Runs with the best implementation of the experts; at a case's first time all of them are tried."""
        if case not in self._chosen:
            seconds = {}
            for name in EXPERTS:
                self._model.set_experts_implementation(name)
                seconds[name] = run().cpu_s
            self._chosen[case] = min(seconds, key=lambda name: seconds[name])
            print(f"{case}: {self._chosen[case]} of {seconds}", flush=True)
        self._model.set_experts_implementation(self._chosen[case])
        return run()

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, torch.Tensor]:
        output = self._model(torch.tensor([list(prompt) for prompt in prompts]), use_cache=True, logits_to_keep=1)
        return output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)

    def _step(self, token: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self._model(token, past_key_values=cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    sys.exit(serve(TransformersPeer))
