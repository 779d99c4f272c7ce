"""Latents in FP8, by setting: 656 bytes a slot, fingerprints of their own, and rows that do not depend on company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kv_transfer.compatibility import check_compatible
from pd_engine.cache.layout import CacheLayout, fp8_slot_bytes
from pd_engine.engine import Engine
from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_engine.model.config import ModelConfig, cache_layout
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.sequence import Sequence
from pd_engine.steps.rows import Span, build_step, token_ids
from pd_kernels.latent_fp8.reference import slot_bytes
from support.engine_cases import (
    all_hidden,
    available_ops,
    cut,
    load_engine,
    mtp_hidden,
    new_sequence,
    random_ids,
    release,
)
from support.engine_v3_config import DEEPSEEK_V3
from support.kernel_cases import same_bits

V3 = ModelConfig.parse(DEEPSEEK_V3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8-latents") / "model"
    write_random_checkpoint(path, {"kv_lora_rank": 128}, seed=3)
    return path


def load(path: Path, ops: str = "auto", dtype: str = "bf16", **settings: object) -> Engine:
    return load_engine(path, dtype=dtype, latent_dtype="fp8", ops=ops, **settings)


def test_a_slot_of_deepseek_v3_has_656_bytes() -> None:
    layout = cache_layout(V3, "fp8", 64, with_mtp=True)
    assert {component.slot_bytes for component in layout.components} == {656}
    assert layout.bytes_per_token == 62 * 656
    assert layout.piece_bytes(0) == 64 * 656
    for latent, rope in ((512, 64), (128, 8), (256, 2)):
        assert fp8_slot_bytes(latent, rope) == slot_bytes(latent, rope)


def test_latents_that_are_no_whole_groups_are_refused_by_name(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(InvalidArgument, match=r"engine\.latent_dtype: fp8 .* multiple of 128, this one has 32"):
        load(checkpoints["base"])


def test_workers_of_both_kinds_do_not_hand_over(checkpoint: Path) -> None:
    """Neither the fingerprint nor the layout, its version included, is that of bf16 latents."""
    fp8, bf16 = load(checkpoint), load_engine(checkpoint, dtype="bf16")
    assert fp8.fingerprint != bf16.fingerprint
    assert (fp8.layout.bytes_per_token, bf16.layout.bytes_per_token) == (4 * (132 + 16), 4 * 136 * 2)

    def check(layout: CacheLayout) -> None:
        check_compatible(
            source="p", source_fingerprint=fp8.fingerprint, source_layout=fp8.layout, source_checksums=True,
            destination="d", destination_fingerprint=fp8.fingerprint, destination_layout=layout,
            destination_checksums=True)

    check(fp8.layout)
    with pytest.raises(FailedPrecondition, match=r"layout version is 2 at p .* and 1 at d"):
        check(bf16.layout)


def written_slots(engine: Engine, sequence: Sequence) -> torch.Tensor:
    """The slots of all tokens but the first, which MTP does not write: uint8 [layers, tokens - 1, bytes]."""
    blocks = torch.tensor(sequence.block_ids)
    return torch.stack([slots[blocks].flatten(0, 1)[1 : sequence.num_tokens] for slots in engine.arena.components])


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("prefill_form", ["absorbed", "expanded"])
def test_chunks_leave_no_trace(checkpoint: Path, ops: str, dtype: str, prefill_form: str) -> None:
    """A row reads its own chunk as the cache stores it: states and slots have the same bits however a prompt is cut."""
    engine = load(checkpoint, ops, dtype, prefill_form=prefill_form)
    ids = random_ids(engine.config.vocab_size, 70)
    results = []
    for sizes in ([70], cut(70, 1, 7, 16), cut(70, 33)):
        sequence = new_sequence(engine, ids, name=f"cut-{sizes[0]}")
        hidden = all_hidden(engine, sequence, sizes)
        states = mtp_hidden(engine, sequence, hidden, cut(69, *sizes))
        results.append((hidden, states, written_slots(engine, sequence)))
        release(engine, sequence)
    for hidden, states, slots in results[1:]:
        assert same_bits(hidden, results[0][0])
        assert same_bits(states, results[0][1])
        assert torch.equal(slots, results[0][2])


def test_what_is_attended_is_what_is_stored(checkpoint: Path) -> None:
    """A slot changed by one step of e4m3 changes the states of later rows."""
    engine = load(checkpoint)
    ids = random_ids(engine.config.vocab_size, 20)
    sequence = new_sequence(engine, ids)
    whole = all_hidden(engine, sequence, [20])
    for slots in engine.main_caches:
        slots.slots_GKE[sequence.block_ids[0], 3, :128] ^= 1
    spans = [Span(sequence=sequence, start=19, count=1)]
    last = engine.main.forward(token_ids(spans), build_step(spans, 16, expand_prompts=False), engine.main_caches)
    assert not torch.equal(last[0], whole[19])
    release(engine, sequence)
