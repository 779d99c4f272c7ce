"""Made-up layouts of every kind of component, handed over from end to end: manifests over gRPC, then the bytes."""

from __future__ import annotations

import pytest

from kv_transfer.source import SourceEnd
from kv_transfer.transports.loopback import LoopbackNetwork, LoopbackPull, LoopbackSource
from pd_engine.cache.layout import CacheLayout, ComponentKind
from pd_engine.settings import TransferSettings
from support.handoff_prompt import ALL_KINDS, PAGED, Prompt
from support.handoffs import DestinationSide, SourceSide, closing_for, new_key, running
from support.leaks import assert_nothing_left, assert_pool_is_free, until

LAYOUTS = {"paged": PAGED, "paged, ring, snapshot": ALL_KINDS}


def sides(transport: str, layout: CacheLayout) -> tuple[SourceSide, DestinationSide]:
    if transport == "loopback":
        network = LoopbackNetwork()
        return SourceSide(layout=layout, transports=[LoopbackSource(network)]), DestinationSide(
            layout=layout, make_transports=lambda arena: [LoopbackPull(network, arena)]
        )
    settings = TransferSettings.model_validate({"transport": transport})
    return SourceSide(layout=layout, settings=settings), DestinationSide(layout=layout, settings=settings)


@pytest.mark.parametrize("transport", ["loopback", "shared_memory", "tcp"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_kind_of_component_arrives(transport: str, layout: str) -> None:
    """Prompts shorter and longer than a block and than the window; published as they would be computed."""
    async with assert_nothing_left(except_files="memfd"):
        source, destination = sides(transport, LAYOUTS[layout])
        async with running(source, destination):
            for number, num_tokens in enumerate((1, 4, 5, 6, 7, 22)):
                await hand_over(source, destination, Prompt(LAYOUTS[layout], num_tokens, number))
        assert_pool_is_free(source.pool)
        assert_pool_is_free(destination.pool)


async def hand_over(source: SourceSide, destination: DestinationSide, prompt: Prompt) -> None:
    key, num_tokens = new_key(), prompt.num_tokens
    info = source.begin(key, num_tokens)
    destination.reserve_and_pull(key, num_tokens, info)
    for end in sorted({min(3, num_tokens), min(9, num_tokens), num_tokens}):  # two chunks and the rest
        first = 0 if end <= 3 else 3 if end <= 9 else 9
        for component in range(len(prompt.layout.components)):
            prompt.write(source.arena, tuple(source.blocks[key]), component, first, end)
            source.source.publish(key, component, end)
    source.source.finish(key, closing_for(num_tokens))
    result = await destination.result_of(key)
    prompt.assert_in(destination.arena, result.block_ids)
    assert result.num_bytes == sum(
        num_slots(part.kind, part.window_slots, num_tokens) * part.slot_bytes for part in prompt.layout.components
    )
    destination.free(key)
    await until(lambda: source.ended[-1:] == [(key, SourceEnd.COMMITTED)])


def num_slots(kind: ComponentKind, window_slots: int, num_tokens: int) -> int:
    """That are moved: all positions, the last window of them, or one block's state."""
    if kind is ComponentKind.PAGED:
        return num_tokens
    return min(num_tokens, window_slots) if kind is ComponentKind.RING else PAGED.block_size
