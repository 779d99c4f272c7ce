"""Prompt chunks: what is written when, and the state that a sequence carries on, through a handoff too."""

from __future__ import annotations

import pytest
import torch

from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.sequence import Sequence
from pd_engine.steps.decode import decode_step
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.steps.state import can_draft, export_hidden, import_hidden, last_hidden
from support.engine_cases import all_hidden, cut, mtp_hidden, new_sequence, random_ids, release
from support.engine_play import Request, alone


@pytest.fixture
def engine(engines: dict[str, Engine]) -> Engine:
    return engines["base"]


def prefill(engine: Engine, sequence: Sequence, sizes: list[int]) -> None:
    for size in sizes:
        prefill_step(engine, [Chunk(sequence=sequence, num_tokens=size)])


def slots(engine: Engine, sequence: Sequence, component: int, count: int) -> torch.Tensor:
    return engine.arena.components[component][sequence.block_ids].flatten(0, 1)[:count].clone()


def test_components_are_reported_in_order_when_their_slots_are_final(engine: Engine) -> None:
    """At each report that component's slots of the step are as at the end, and later ones are not written yet."""
    ids = random_ids(320, 40)
    done = new_sequence(engine, ids, name="done")
    prefill(engine, done, [40])
    want = [slots(engine, done, component, 40) for component in range(4)]
    sequence = new_sequence(engine, ids)
    for component in engine.arena.components:
        component[sequence.block_ids] = float("nan")
    start, reported = 0, []
    for size in (25, 15):
        def check(component: int, start: int = start, end: int = start + size) -> None:
            reported.append(component)
            assert torch.equal(slots(engine, sequence, component, end), want[component][:end])
            for later in range(component + 1, 4):
                assert slots(engine, sequence, later, end)[start:].isnan().all()

        prefill_step(engine, [Chunk(sequence=sequence, num_tokens=size)], check)
        start += size
    release(engine, sequence, done)
    assert reported == [0, 1, 2, 3] * 2


def test_every_component_is_reported_even_without_mtp_rows(engine: Engine) -> None:
    """A prompt of one token has no MTP row, but its slot 0 is final all the same."""
    sequence = new_sequence(engine, [7])
    for component in engine.arena.components:
        component[sequence.block_ids] = float("nan")
    reported: list[int] = []
    prefill_step(engine, [Chunk(sequence=sequence, num_tokens=1)], reported.append)
    assert reported == [0, 1, 2, 3]
    assert sequence.num_computed_mtp == 1
    assert slots(engine, sequence, 3, 1).abs().sum() == 0
    release(engine, sequence)


@pytest.mark.parametrize("sizes", [[1, 40], [40, 1], cut(41, 7), [41]])
def test_state_does_not_depend_on_chunks(engine: Engine, sizes: list[int]) -> None:
    ids = random_ids(320, 41)
    whole, chunked = new_sequence(engine, ids, name="whole"), new_sequence(engine, ids, name="chunked")
    prefill(engine, whole, [41])
    for component in engine.arena.components:
        component[chunked.block_ids] = float("nan")
    prefill(engine, chunked, sizes)
    for component in range(4):
        assert torch.equal(slots(engine, whole, component, 41), slots(engine, chunked, component, 41))
    assert chunked.num_computed == chunked.num_computed_mtp == 41
    assert torch.equal(last_hidden(whole), last_hidden(chunked))
    hidden = all_hidden(engine, whole, [41])
    assert torch.equal(last_hidden(chunked), hidden[-1:])
    mtp_hidden(engine, whole, hidden, [40])
    assert torch.equal(slots(engine, whole, 3, 41), slots(engine, chunked, 3, 41)), "MTP took other states"
    assert can_draft(chunked)
    release(engine, whole, chunked)


def test_a_sequence_continues_from_what_a_handoff_ships(engine: Engine, engines: dict[str, Engine]) -> None:
    """The prompt's slots, the last h and the first token, copied into other blocks of another engine's arena."""
    request = Request(prompt=tuple(random_ids(320, 37)), params={"temperature": 0.8, "seed": 3, "max_tokens": 12})
    want = alone(engine, request)
    source = new_sequence(engine, request.prompt, name="source", **request.params)
    prefill(engine, source, [20, 17])
    [first] = sample_first(engine, [source])
    raw = export_hidden(source)
    target = new_sequence(engine, source.token_ids, name="target", num_prompt_tokens=37, speculate=2, **request.params)
    for component in range(4):
        for from_block, to_block in zip(source.block_ids[:3], target.block_ids, strict=False):
            num_tokens = min(16, 37 - 16 * source.block_ids.index(from_block))
            engine.arena.piece(component, to_block, num_tokens)[:] = engine.arena.piece(
                component, from_block, num_tokens
            )
    target.num_computed = target.num_computed_mtp = 37
    target.pending_hidden = import_hidden(raw, hidden_size=64, dtype="fp32")
    tokens = [first]
    while target.finish_reason() is None:
        [output] = decode_step(engine, [target])
        tokens += output.tokens
    release(engine, source, target)
    assert tuple(tokens) == want.tokens
    assert target.num_drafted > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_last_hidden_on_the_wire(engine: Engine, dtype: str) -> None:
    row = torch.randn(1, 64).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    sequence = new_sequence(engine, [7])
    sequence.pending_hidden = row
    raw = export_hidden(sequence)
    release(engine, sequence)
    assert torch.equal(import_hidden(raw, hidden_size=64, dtype=dtype), row)
    for wrong in (b"", raw[:-1], raw + b"\0"):
        with pytest.raises(InvalidArgument, match="last hidden state must have"):
            import_hidden(wrong, hidden_size=64, dtype=dtype)


def test_a_cached_prompt_needs_its_last_token_only(engine: Engine) -> None:
    """All latents are there: computing the last token again gives its h, writes the same bits, and drafts go on."""
    request = Request(prompt=tuple(random_ids(320, 30)), params={"temperature": 0.0, "max_tokens": 12})
    want = alone(engine, request)
    sequence = new_sequence(engine, request.prompt, speculate=2, **request.params)
    prefill(engine, sequence, [30])
    before = [slots(engine, sequence, component, 30) for component in range(4)]
    sequence.num_computed, sequence.pending_hidden = 29, None
    prefill(engine, sequence, [1])
    assert all(torch.equal(old, slots(engine, sequence, c, 30)) for c, old in enumerate(before))
    tokens = sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        tokens += decode_step(engine, [sequence])[0].tokens
    release(engine, sequence)
    assert tuple(tokens) == want.tokens
    assert sequence.num_drafted > 0


def test_a_prefix_without_mtp_slots_serves_the_main_layers(engine: Engine) -> None:
    """Speculation stays off for that sequence; the answer is the same."""
    request = Request(prompt=tuple(random_ids(320, 30)), params={"temperature": 0.0, "max_tokens": 12})
    want = alone(engine, request)
    sequence = new_sequence(engine, request.prompt, speculate=2, **request.params)
    prefill(engine, sequence, [16])
    sequence.num_computed_mtp, sequence.pending_hidden = 0, None
    engine.arena.components[3][sequence.block_ids] = float("nan")
    prefill(engine, sequence, [5, 9])
    tokens = sample_first(engine, [sequence])
    while sequence.finish_reason() is None:
        tokens += decode_step(engine, [sequence])[0].tokens
    engine.arena.components[3][sequence.block_ids] = 0
    release(engine, sequence)
    assert tuple(tokens) == want.tokens
    assert sequence.num_drafted == 0
    assert sequence.num_computed_mtp == 0


def test_steps_refuse_what_their_caller_must_not_ask(engine: Engine) -> None:
    sequence = new_sequence(engine, random_ids(320, 20), num_blocks=1)
    for size in (0, 21):
        with pytest.raises(AssertionError):
            prefill_step(engine, [Chunk(sequence=sequence, num_tokens=size)])
    with pytest.raises(AssertionError, match="blocks do not hold"):
        prefill_step(engine, [Chunk(sequence=sequence, num_tokens=20)])
    with pytest.raises(AssertionError):
        sample_first(engine, [sequence])
    with pytest.raises(AssertionError):
        decode_step(engine, [sequence])
    assert (sequence.num_computed, sequence.num_tokens, sequence.pending_hidden) == (0, 20, None)
    release(engine, sequence)
