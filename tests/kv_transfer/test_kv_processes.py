"""Handoffs between two real processes."""

from __future__ import annotations

from support.handoffs import LAYOUT, DestinationSide, SourceSide, new_key, running
from support.source_process import ends, pins, source_process


async def test_two_processes_hand_over() -> None:
    destination = DestinationSide()
    async with source_process() as source, running(destination):
        for num_tokens in (1, 16, 100):
            key = new_key()
            info = await source.call(SourceSide.begin, key, num_tokens)
            sent = await source.call(SourceSide.contents, key, num_tokens)
            destination.reserve_and_pull(key, num_tokens, info)
            await source.call(SourceSide.publish_all, key, num_tokens)
            result = await destination.result_of(key)
            assert destination.contents(result, num_tokens) == sent
            assert result.num_bytes == num_tokens * LAYOUT.bytes_per_token
            destination.free(key)
        await source.until(pins, (0, 64))  # commits are sent after completion
        assert await source.call(ends) == ["committed"] * 3
        assert destination.pool.num_free == 64
