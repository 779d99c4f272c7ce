"""A whole engine on a device that is not the host: no tensor of the host reaches a kernel, nor any op of torch beside
one of the device. Torch's meta device stands in for a GPU: it has shapes and no memory, and refuses to be mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from pd_engine import engine as engine_module
from pd_engine.engine import Engine
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.steps import decode, prefill
from pd_engine.steps.state import export_hidden
from pd_engine.steps.warm_up import warm_up
from pd_kernels.contract import WrongArgument
from pd_kernels.ops import SamplingRows
from support import triton_shim  # noqa: F401  (before any module with kernels)
from support.engine_cases import load_engine, random_ids
from support.engine_fp8 import write_fp8_checkpoint
from support.engine_play import Player, Request

from triton.runtime.interpreter import InterpretedFunction  # isort: skip

from pd_kernels import triton_ops  # isort: skip
from pd_kernels.triton_ops import TritonOps  # isort: skip

DEVICE = torch.device("meta")
LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1}


class MetaOps(TritonOps):
    """What is returned as numpy has no values here: any will do."""

    def sample(self, logits_TZ: Tensor, rows: SamplingRows) -> npt.NDArray[np.int32]:
        assert logits_TZ.device == DEVICE
        return np.full(logits_TZ.shape[0], 7, dtype=np.int32)

    def logprobs(self, logits_TZ: Tensor) -> npt.NDArray[np.float32]:
        assert logits_TZ.device == DEVICE
        return np.zeros(tuple(logits_TZ.shape), dtype=np.float32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are launched, instead of running them; all their tensors must be on the device."""
    names: list[str] = []

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        for value in [*arguments, *options.values()]:
            assert not isinstance(value, Tensor) or value.device == DEVICE, f"{self.__name__}: {value.device}"
        names.append(self.__name__)

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    monkeypatch.setattr(triton_ops, "_device_name", str)
    monkeypatch.setattr(engine_module, "_load_ops", lambda settings, dtype: MetaOps(DEVICE))
    for steps in (prefill, decode):
        monkeypatch.setattr(steps, "finite_rows", lambda logits_TZ: [True] * logits_TZ.shape[0])
    monkeypatch.setattr(Player, "_checksums", lambda self, sequence: ())
    yield names
    assert "split_kernel" in names


def play(engine: Engine) -> None:
    """Two prompts in chunks, first tokens, decoding with two drafts and with none, logprobs."""
    player = Player(engine)
    for length, speculate in ((9, 2), (3, 0)):
        player.add(Request(prompt=tuple(random_ids(300, length)), params={"max_tokens": 7, "logprobs": 2}),
                   speculate=speculate)
    player.prefill({0: 5, 1: 3})
    player.prefill({0: 4})
    assert all(sequence.pending_hidden is not None for sequence in player.sequences)
    assert all(sequence.pending_hidden.device == DEVICE for sequence in player.sequences if sequence.pending_hidden is
               not None)
    assert all(len(answer.tokens) == 7 for answer in player.finish())


@pytest.mark.parametrize("settings", [
    {}, {"dtype": "bf16"}, {"prefill_form": "expanded"}, {"dtype": "bf16", "latent_dtype": "fp8"},
], ids=["fp32", "bf16", "expanded", "fp8 latents"])
def test_a_request_from_beginning_to_end(tmp_path: Path, launched: list[str], settings: dict[str, Any]) -> None:
    write_random_checkpoint(tmp_path / "model", {**LAYERS, "kv_lora_rank": 128}, seed=3)
    engine = load_engine(tmp_path / "model", **settings)
    assert engine.has_mtp
    assert {slots.device for slots in engine.arena.components} == {DEVICE}
    play(engine)
    assert ("expanded_kernel" in launched) == (settings.get("prefill_form") == "expanded")


def test_fp8_weights(tmp_path: Path, launched: list[str]) -> None:
    engine = load_engine(write_fp8_checkpoint(tmp_path / "model"), dtype="bf16")
    play(engine)
    assert "gate_up_kernel" in launched
    assert "quant_kernel" not in launched, "activations are multiplied as they are"


def test_warming_up_launches_what_requests_will(tmp_path: Path, launched: list[str]) -> None:
    """Attention over several splits, chunks and single rows, drafts, sampling; and no block stays taken."""
    write_random_checkpoint(tmp_path / "model", {**LAYERS, "max_position_embeddings": 2048}, seed=3)
    engine = load_engine(tmp_path / "model")
    warm_up(engine, 256)
    warmed = set(launched)
    assert "combine_kernel" in warmed
    play(engine)
    assert set(launched) == warmed
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("context", [2, 4, 5, 40])
def test_warming_up_where_there_is_little_room(tmp_path: Path, launched: list[str], context: int) -> None:
    write_random_checkpoint(tmp_path / "model", LAYERS, seed=3)
    engine = load_engine(tmp_path / "model", max_context_length=context)
    warm_up(engine, 16)
    assert ("split_kernel" in launched) == (context > 4)
    assert engine.pool.num_free == engine.pool.num_blocks
    launched.append("split_kernel")


def test_what_a_tensor_of_the_host_would_do(tmp_path: Path, launched: list[str]) -> None:
    """The stand-in does see it."""
    write_random_checkpoint(tmp_path / "model", LAYERS, seed=3)
    engine = load_engine(tmp_path / "model")
    play(engine)
    with pytest.raises(WrongArgument, match=r"on meta; got .* on cpu"):
        engine.ops.rms_norm(torch.zeros(1, 64, device=DEVICE), torch.zeros(64), 1e-6)
    with pytest.raises(RuntimeError):
        torch.cat([torch.zeros(1, device=DEVICE), torch.zeros(1)])
    player = Player(engine)
    player.add(Request(prompt=(5, 6)))
    player.prefill({0: 2})
    with pytest.raises(NotImplementedError, match="meta"):
        export_hidden(player.sequences[0])  # it goes to the host, which a device without memory cannot do
