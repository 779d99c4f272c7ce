"""One handoff from end to end over shared memory, source and destination in one process."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kv_transfer.source import SourceEnd
from pd_engine.settings import TransferSettings
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


async def test_the_longest_lease_that_can_be_set() -> None:
    """The source keeps its pins for a second longer, and the number that it says is in range all the same."""
    longest_ms = 3_600_000
    with pytest.raises(ValidationError):
        TransferSettings(lease_ms=longest_ms + 1)
    settings = TransferSettings(lease_ms=longest_ms)
    source, destination = SourceSide(settings=settings), DestinationSide(settings=settings)
    async with running(source, destination):
        key = new_key()
        destination.reserve_and_pull(key, 20, source.begin(key, 20, lease_ms=longest_ms))
        source.publish_all(key, 20)
        await destination.result_of(key)
        destination.free(key)
