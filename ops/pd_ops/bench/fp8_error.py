"""What FP8 costs in accuracy, on the demo checkpoint: `python -m pd_ops.bench.fp8_error`, some minutes of one core.

The demo checkpoint is written again with FP8 weights. Texts that the float32 model has sampled are then read by each
variant, and its logits compared; and each variant continues prompts greedily.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.model.checkpoint import WEIGHTS_FILE, check_tensors, resolve_model, stored_tensors
from pd_engine.model.config import CONFIG_FILE, ModelConfig, cache_layout
from pd_engine.model.random_checkpoint import FP8_QUANTIZATION
from pd_engine.model.tensors import QUANTIZED_KINDS, checkpoint_tensors, scale_name
from pd_engine.model.weights import load_weights
from pd_engine.sampling.params import NO_TOP_K, SamplingParams
from pd_engine.sequence import Sequence
from pd_engine.settings import EngineSettings
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.rows import Span, build_step, token_ids
from pd_kernels.fp8_quant.reference import quantize_weight
from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.quantized_ops import QuantizingOps
from pd_ops.tables import table

NUM_TEXTS, TEXT_TOKENS = 8, 256
PROMPT_TOKENS, GREEDY_TOKENS = 32, 64
COLUMNS = ("variant", "error, same weights fp32", "error, demo fp32", "error, demo bf16", "nats a token",
           "most likely token", "greedy tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a model makes of the texts.

    Attributes:
        logits_NZ: float32, of every position that a known token follows.
        answers: greedy continuations of the first `PROMPT_TOKENS` of each text.
    """

    logits_NZ: Tensor
    answers: tuple[tuple[int, ...], ...]


def write_fp8_copy(source: Path, target: Path) -> None:
    """The checkpoint in folder `source`, one file of plain weights, with FP8 matrices."""
    shutil.copytree(source, target)
    config = ModelConfig.load(source)
    specs, tensors = checkpoint_tensors(config), {}
    with safe_open(source / WEIGHTS_FILE, framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118
            tensor = reader.get_tensor(name)
            if specs[name].kind in QUANTIZED_KINDS:
                tensor, tensors[scale_name(name)] = quantize_weight(tensor)
            tensors[name] = tensor
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    data = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8")) | {"quantization_config": FP8_QUANTIZATION}
    (target / CONFIG_FILE).write_text(json.dumps(data), encoding="utf-8")


def load(path: Path, dtype: str, latent_dtype: str = "auto") -> Engine:
    settings = EngineSettings.model_validate({"dtype": dtype, "latent_dtype": latent_dtype, "cache_mib": 64})
    return Engine.load(path, settings, max_speculate=0)


def load_quantizing(path: Path) -> Engine:
    """Activations quantized too."""
    config, ops = ModelConfig.load(path), QuantizingOps()
    stored = stored_tensors(path)
    check_tensors(config, stored, with_mtp=False)
    return Engine(
        config=config, weights=load_weights(config, stored, ops, dtype="bf16", with_mtp=False), ops=ops,
        layout=cache_layout(config, "bf16", 16, with_mtp=False), num_blocks=512, max_context_length=1024,
        dtype="bf16", prefill_form="absorbed", fingerprint="", load_seconds=0.0,
    )


def complete(engine: Engine, prompt: Seq[int], num_tokens: int, *, temperature: float, seed: int = 0) -> list[int]:
    """So many tokens after the prompt."""
    params = SamplingParams(
        temperature=temperature, top_p=1.0, top_k=NO_TOP_K, seed=seed, max_tokens=num_tokens, ignore_eos=True
    )
    sequence = Sequence(
        name="completion", token_ids=list(prompt), num_prompt_tokens=len(prompt), params=params,
        ending_ids=frozenset(), speculate=0,
        block_ids=engine.pool.allocate(engine.layout.num_blocks_for(len(prompt) + num_tokens), "completion"),
    )
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=len(prompt))])
    sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        decode_step(engine, [sequence])
    engine.pool.release(sequence.block_ids, "completion")
    return sequence.token_ids[len(prompt) :]


def read(engine: Engine, texts: Seq[Seq[int]]) -> Reading:
    """Every position's logits, as serving would compute them: slots are written, then attended."""
    logits = []
    for text in texts:
        params = SamplingParams(temperature=0.0, top_p=1.0, top_k=NO_TOP_K, seed=0, max_tokens=1)
        sequence = Sequence(
            name="text", token_ids=list(text), num_prompt_tokens=len(text), params=params, ending_ids=frozenset(),
            speculate=0, block_ids=engine.pool.allocate(engine.layout.num_blocks_for(len(text)), "text"),
        )
        spans = [Span(sequence=sequence, start=0, count=len(text))]
        hidden = engine.main.forward(token_ids(spans), build_step(spans, engine.layout.block_size), engine.main_caches)
        logits.append(engine.main.logits(hidden)[:-1].clone())
        engine.pool.release(sequence.block_ids, "text")
    answers = [tuple(complete(engine, text[:PROMPT_TOKENS], GREEDY_TOKENS, temperature=0.0)) for text in texts]
    return Reading(logits_NZ=torch.cat(logits), answers=tuple(answers))


def relative_error(logits_NZ: Tensor, expected_NZ: Tensor) -> float:
    """Of a row the root mean square of the difference, over that of the expected logits around their mean; the median
    of all rows: in some a router chooses another expert, in any dtype, and their errors are no matter of precision."""
    spread_N = (expected_NZ - expected_NZ.mean(dim=-1, keepdim=True)).square().mean(dim=-1)
    return float(((logits_NZ - expected_NZ).square().mean(dim=-1) / spread_N).sqrt().median())


def nats_a_token(logits_NZ: Tensor, texts: Seq[Seq[int]]) -> float:
    following = torch.tensor([token for text in texts for token in text[1:]])
    return float(torch.nn.functional.cross_entropy(logits_NZ, following))


def same_answers(one: Reading, other: Reading) -> float:
    """The share of greedy tokens before the first difference."""
    counts = [
        next((index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        for ours, theirs in zip(one.answers, other.answers, strict=True)
    ]
    return sum(counts) / sum(len(answer) for answer in one.answers)


def main() -> None:
    demo = resolve_model("demo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pd-relay-fp8-") as folder:
        quantized = Path(folder) / "model"
        write_fp8_copy(demo, quantized)
        exact = load(demo, "fp32")
        bos = 0
        texts = [
            [bos, *complete(exact, [bos], TEXT_TOKENS - 1, temperature=1.0, seed=seed)] for seed in range(NUM_TEXTS)
        ]
        demo_fp32, demo_bf16 = read(exact, texts), read(load(demo, "bf16"), texts)
        fp8_fp32 = read(load(quantized, "fp32"), texts)
        variants = [
            ("fp32", demo_fp32, demo_fp32),
            ("fp32, FP8 latents", read(load(demo, "fp32", "fp8"), texts), demo_fp32),
            ("FP8 weights, fp32", fp8_fp32, fp8_fp32),
            ("bf16", demo_bf16, demo_fp32),
            ("bf16, FP8 latents", read(load(demo, "bf16", "fp8"), texts), demo_fp32),
            ("FP8 weights, bf16", read(load(quantized, "bf16"), texts), fp8_fp32),
            ("FP8 weights, bf16, FP8 latents", read(load(quantized, "bf16", "fp8"), texts), fp8_fp32),
            ("FP8 weights and activations (W8A8)", read(load_quantizing(quantized), texts), fp8_fp32),
        ]
    rows = [
        (
            name, f"{relative_error(variant.logits_NZ, same.logits_NZ):.4f}",
            f"{relative_error(variant.logits_NZ, demo_fp32.logits_NZ):.4f}",
            f"{relative_error(variant.logits_NZ, demo_bf16.logits_NZ):.4f}",
            f"{nats_a_token(variant.logits_NZ, texts):.4f}",
            f"{float((variant.logits_NZ.argmax(-1) == demo_bf16.logits_NZ.argmax(-1)).float().mean()):.1%}",
            f"{same_answers(variant, demo_bf16):.1%}",
        )
        for name, variant, same in variants
    ]
    print(table(COLUMNS, rows))
    print(f"{NUM_TEXTS} texts of {TEXT_TOKENS} tokens; tokens are compared with bf16's")
    print(identity_text(identity()))


if __name__ == "__main__":
    main()
