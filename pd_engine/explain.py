"""What a model computes, stage by stage in order: shapes, weights and FLOPs. From config.json alone; torch-free.

FLOPs are those of matrix products, two for a multiplication and addition; norms, rotations, softmax and activations are
left out (they are not matrix products, and together below one percent of a large model). Attention counts the keys that
are visible: N(N+1)/2 pairs in a prompt of N tokens, N for a token decoded at position N-1. Experts count as used: those
that a token is sent to, and the shared one. In shapes T is the number of tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pd_engine.cache.layout import DTYPE_BYTES
from pd_engine.model.config import ModelConfig, cache_layout, check_latent_dtype
from pd_engine.model.fp16_guard import fp16_guard

PrefillForm = Literal["absorbed", "expanded"]
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of the computation, of one layer.

    Attributes:
        part: what it belongs to: "embedding", "layers 0-2", "layers 3-60", "head", "mtp".
        repeats: how many layers have it; the numbers below are of one.
        output: shape and dtype of what it gives, such as "[T, 128, 576] bf16".
        parameters, weight_bytes: of its weights, in the engine's dtype or in FP8 without its scales.
        prompt_flops: for a prompt of N tokens.
        token_flops: for one token decoded at a context of N.
    """

    part: str
    name: str
    repeats: int
    output: str
    parameters: int
    weight_bytes: int
    prompt_flops: int
    token_flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """All stages in order, and their totals over all layers. MTP is counted apart from the main model.

    Attributes:
        residual_factor: how much smaller than the model's own the residual stream is kept: 1 but in fp16.
    """

    num_tokens: int
    dtype: str
    residual_factor: float
    weight_format: str
    prefill_form: PrefillForm
    stages: tuple[Stage, ...]
    parameters: int
    active_parameters: int
    mtp_parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    prompt_flops: int
    token_flops: int
    mtp_prompt_flops: int
    mtp_token_flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """Where a group of equal layers stands."""

    part: str
    repeats: int
    is_moe: bool


def explain_model(
    config: ModelConfig, *, num_tokens: int, dtype: str = "bf16", prefill_form: PrefillForm = "absorbed",
    latent_dtype: str = "auto",
) -> Explanation:
    """The stages of a model.

    Args:
        num_tokens: N, the length of the prompt, and the context at which a token is decoded.
        dtype: the engine's, "bf16", "fp16" or "fp32".
        prefill_form, latent_dtype: as in the settings; decoding is always absorbed.

    Raises:
        InvalidArgument: the checkpoint's latents cannot be kept in that dtype.
    """
    assert num_tokens >= 1, num_tokens
    check_latent_dtype(config, dtype, latent_dtype)
    work = _Work(config, num_tokens, dtype, prefill_form)
    main = tuple(work.main())
    mtp = tuple(work.mtp()) if config.has_mtp else ()
    parameters = sum(stage.parameters * stage.repeats for stage in main)
    return Explanation(
        num_tokens=num_tokens,
        dtype=dtype,
        residual_factor=fp16_guard(config, dtype).factor,
        weight_format=config.weight_format,
        prefill_form=prefill_form,
        stages=main + mtp,
        parameters=parameters,
        active_parameters=parameters - _idle_parameters(config),
        mtp_parameters=sum(stage.parameters * stage.repeats for stage in mtp),
        weight_bytes=sum(stage.weight_bytes * stage.repeats for stage in main + mtp),
        cache_bytes_per_token=cache_layout(
            config, dtype if latent_dtype == "auto" else latent_dtype, 1, config.has_mtp
        ).bytes_per_token,
        prompt_flops=sum(stage.prompt_flops * stage.repeats for stage in main),
        token_flops=sum(stage.token_flops * stage.repeats for stage in main),
        mtp_prompt_flops=sum(stage.prompt_flops * stage.repeats for stage in mtp),
        mtp_token_flops=sum(stage.token_flops * stage.repeats for stage in mtp),
    )


def _idle_parameters(config: ModelConfig) -> int:
    """Of the experts that a token is not sent to, in the main layers."""
    if config.n_routed_experts is None or config.moe_intermediate_size is None:
        return 0
    num_moe = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    num_idle = config.n_routed_experts - config.num_experts_per_token
    return num_moe * num_idle * 3 * config.hidden_size * config.moe_intermediate_size


class _Work:
    """Builds stages; `pairs` are the (query, visible key) pairs of the whole prompt."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: str, prefill_form: PrefillForm) -> None:
        self._config = config
        self._num_tokens = num_tokens
        self._pairs = num_tokens * (num_tokens + 1) // 2
        self._dtype = dtype
        self._expanded = prefill_form == "expanded"

    def main(self) -> Iterator[Stage]:
        config = self._config
        hidden, vocab = config.hidden_size, config.vocab_size
        embedding = _Layer(part="embedding", repeats=1, is_moe=False)
        yield self._stage(embedding, "rows of the table", (hidden,), matrix=vocab * hidden, flops=0)
        for layer in self._layers():
            yield from self._layer(layer)
        yield from self._head("head", "final norm", with_head=True)

    def mtp(self) -> Iterator[Stage]:
        """The extra layer. Embedding and head are the main model's: only their work is counted, not their weights."""
        hidden = self._config.hidden_size
        layer = _Layer(part="mtp", repeats=1, is_moe=self._config.is_moe(self._config.num_hidden_layers))
        yield self._stage(layer, "norms of embedding and h, side by side", (2 * hidden,), norm=2 * hidden)
        yield self._stage(layer, "eh_proj", (hidden,), matrix=2 * hidden * hidden)
        yield from self._layer(layer)
        yield from self._head("mtp", "shared_head norm", with_head=False)

    def _layers(self) -> list[_Layer]:
        """Runs of equal layers, in order."""
        runs: list[_Layer] = []
        kinds = [self._config.is_moe(layer) for layer in range(self._config.num_hidden_layers)]
        start = 0
        for layer in range(1, len(kinds) + 1):
            if layer == len(kinds) or kinds[layer] != kinds[start]:
                part = f"layer {start}" if layer == start + 1 else f"layers {start}-{layer - 1}"
                runs.append(_Layer(part=part, repeats=layer - start, is_moe=kinds[start]))
                start = layer
        return runs

    def _layer(self, layer: _Layer) -> Iterator[Stage]:
        hidden = self._config.hidden_size
        yield self._stage(layer, "input norm", (hidden,), norm=hidden)
        yield from self._attention(layer)
        yield self._stage(layer, "add, post-attention norm", (hidden,), norm=hidden)
        yield from self._experts(layer) if layer.is_moe else self._mlp(layer)

    def _attention(self, layer: _Layer) -> Iterator[Stage]:
        config = self._config
        hidden, heads, latent, width = (
            config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.cache_width
        )
        queries = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            columns = queries + width
            yield self._stage(layer, "q and kv_a, one product", (columns,), matrix=hidden * columns, quantized=True)
        else:
            rank = config.q_lora_rank
            columns = rank + width
            yield self._stage(layer, "q_a and kv_a, one product", (columns,), matrix=hidden * columns, quantized=True)
            yield self._stage(layer, "norm of the low rank", (rank,), norm=rank)
            yield self._stage(layer, "q_b", (queries,), matrix=rank * queries, quantized=True)
        yield self._stage(layer, "norm of the latent, rotated key, cache write", (width,), norm=latent)
        yield from self._attend(layer)
        yield self._stage(layer, "o", (hidden,), matrix=heads * config.v_head_dim * hidden, quantized=True)

    def _attend(self, layer: _Layer) -> Iterator[Stage]:
        """kv_b's halves go into the queries and out of the values (absorbed), or expand every key once."""
        config = self._config
        heads, latent, width = config.num_attention_heads, config.kv_lora_rank, config.cache_width
        key, value = config.qk_nope_head_dim, config.v_head_dim
        absorb_keys, absorb_values = 2 * heads * key * latent, 2 * heads * value * latent
        absorbed_pair, expanded_pair = 2 * heads * (width + latent), 2 * heads * (config.qk_head_dim + value)
        num_tokens, pairs = self._num_tokens, self._pairs
        yield self._stage(
            layer, "queries absorbed" + (" (prompt: keys expanded)" if self._expanded else ""), (heads, width),
            matrix=heads * key * latent, token_flops=absorb_keys, prompt_flops=num_tokens * absorb_keys,
        )
        yield self._stage(
            layer, "attention over the cache", (heads, latent), token_flops=num_tokens * absorbed_pair,
            prompt_flops=pairs * (expanded_pair if self._expanded else absorbed_pair),
        )
        yield self._stage(
            layer, "values out of the latent" + (" (prompt: values expanded)" if self._expanded else ""),
            (heads * value,), matrix=heads * value * latent, token_flops=absorb_values,
            prompt_flops=num_tokens * absorb_values,
        )

    def _mlp(self, layer: _Layer) -> Iterator[Stage]:
        hidden, width = self._config.hidden_size, self._config.intermediate_size
        yield self._stage(layer, "dense MLP", (hidden,), matrix=3 * hidden * width, quantized=True)

    def _experts(self, layer: _Layer) -> Iterator[Stage]:
        config = self._config
        hidden, num_experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
        assert num_experts is not None and width is not None
        per_token = config.num_experts_per_token
        gate, one = num_experts * hidden, 3 * hidden * width
        yield self._stage(layer, "router", (per_token,), matrix=gate, fp32=num_experts, output_dtype="fp32")
        yield self._stage(
            layer, f"routed experts, {per_token} of {num_experts}", (hidden,), matrix=num_experts * one,
            flops=2 * per_token * one, quantized=True,
        )
        if config.n_shared_experts:
            yield self._stage(layer, "shared expert", (hidden,), matrix=config.n_shared_experts * one, quantized=True)

    def _head(self, part: str, norm: str, *, with_head: bool) -> Iterator[Stage]:
        """Logits are made of a prompt's last row only."""
        hidden, vocab = self._config.hidden_size, self._config.vocab_size
        layer = _Layer(part=part, repeats=1, is_moe=False)
        yield self._stage(layer, f"add, {norm}", (hidden,), norm=hidden)
        flops = 2 * hidden * vocab
        yield self._stage(
            layer, "head" if with_head else "head (the main model's)", (vocab,),
            matrix=hidden * vocab if with_head else 0, prompt_flops=flops, token_flops=flops, output_dtype="fp32",
        )

    def _stage(
        self, layer: _Layer, name: str, dims: tuple[int, ...], *, matrix: int = 0, norm: int = 0, fp32: int = 0,
        flops: int | None = None, prompt_flops: int | None = None, token_flops: int | None = None,
        output_dtype: str | None = None, quantized: bool = False,
    ) -> Stage:
        """A stage with `matrix` weights in the engine's dtype (FP8 ones if `quantized`, in such checkpoints) and `norm`
        + `fp32` ones in fp32. Unless given, FLOPs are two a weight of the matrix and token."""
        matrix_dtype = "fp8" if quantized and self._config.weight_format == "fp8" else self._dtype
        of_token = 2 * matrix if flops is None else flops
        return Stage(
            part=layer.part,
            name=name,
            repeats=layer.repeats,
            output=f"[{', '.join(['T', *map(str, dims)])}] {output_dtype or self._dtype}",
            parameters=matrix + norm + fp32,
            weight_bytes=matrix * DTYPE_BYTES[matrix_dtype] + (norm + fp32) * FP32_BYTES,
            prompt_flops=self._num_tokens * of_token if prompt_flops is None else prompt_flops,
            token_flops=of_token if token_flops is None else token_flops,
        )
