"""The FP16 guard: in fp16 the residual stream is kept s times smaller, s being the model's `routed_scaling_factor`.

fp16 ends at 65,504, and the residual stream of a large model does not. A norm gives the same for a stream that is s
times smaller, if its eps is s² times smaller, so nothing behind a norm changes (deepseek_v3.md §5):

- the stream as a layer finds it first (the embedding in layer 0, eh_proj's output in MTP's) is scaled by 1/s when the
  attention output is added, after the layer's input norm;
- attention outputs and dense MLPs' outputs are scaled by 1/s when they are added;
- routed experts are summed with weights that lack the factor s, and the shared expert's output is scaled by 1/s.

Sums are formed in float32 and rounded once, so that the scales cost no rounding. What is not in the stream (queries,
latents, the product within an MLP, an MLP's output before it is added) has fp16's range as it is. A model whose s is
at most 1 is not scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_engine.model.config import ModelConfig

VERSION = "fp16-guard-1"  # part of an fp16 engine's fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16Guard:
    """By how much the residual stream is smaller than the model's own: 1 in other dtypes than fp16."""

    factor: float

    @property
    def scale(self) -> float:
        """Of what is added to the stream, and of the stream once."""
        return 1 / self.factor

    def eps(self, eps: float) -> float:
        """Of a norm of the stream; exactly what `eps` is for a stream that is not scaled."""
        return eps / self.factor**2


NO_GUARD = Fp16Guard(factor=1.0)


def fp16_guard(config: ModelConfig, dtype: str) -> Fp16Guard:
    """`dtype`: the engine's. Experts' weights lose the factor s and no more, so that their sum is rounded as it is."""
    if dtype != "fp16":
        return NO_GUARD
    return Fp16Guard(factor=max(1.0, config.routed_scaling_factor))
