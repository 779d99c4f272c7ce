"""One handoff from end to end over shared memory, source and destination in one process."""

from __future__ import annotations

from kv_transfer.source import SourceEnd
from support.handoffs import LAYOUT, DestinationSide, SourceSide, closing_for, new_key, running
from support.leaks import assert_nothing_left, assert_pool_is_free


async def test_a_prompt_arrives_byte_for_byte() -> None:
    async with assert_nothing_left():
        await _hand_over_one()


async def _hand_over_one() -> None:
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        key, num_tokens = new_key(), 37
        expected_blocks = LAYOUT.num_blocks_for(num_tokens)
        info = source.begin(key, num_tokens)
        sent = source.contents(key, num_tokens)
        assert destination.destination.bytes_per_s == 0
        destination.reserve_and_pull(key, num_tokens, info)
        source.publish_all(key, num_tokens)
        result = await destination.result_of(key)
        assert destination.contents(result, num_tokens) == sent
        assert result.num_bytes == num_tokens * LAYOUT.bytes_per_token
        assert result.transport == "shared_memory"
        assert destination.destination.bytes_per_s > 0
        assert result.closing == closing_for(num_tokens)
        assert result.checksums.shape == (3, expected_blocks)
        destination.free(key)
    assert_pool_is_free(destination.pool)
    assert_pool_is_free(source.pool)
    assert source.ended == [(key, SourceEnd.COMMITTED)]
