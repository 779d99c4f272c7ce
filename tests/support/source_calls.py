"""What tests of handoffs between processes ask of a `SourceProcess`."""

from __future__ import annotations

from typing import Any

from kv_transfer.journey import JourneyKey, SourceInfo
from kv_transfer.transports.choice import host_facts
from pd_engine.settings import TransferSettings
from support.handoffs import LAYOUT, DestinationSide, SourceSide, new_key
from support.leaks import assert_pool_is_free, until
from support.source_process import SourceProcess

PROCESS_TRANSPORTS = ("shared_memory", "tcp", *(["nixl"] if host_facts().has_nixl else []))
NUM_TOKENS = 100
NUM_BLOCKS = LAYOUT.num_blocks_for(NUM_TOKENS)


def settings_of(transport: str, **changes: Any) -> TransferSettings:
    return TransferSettings.model_validate({"transport": transport, **changes})


def publish(side: SourceSide, key: JourneyKey, component: int, num_tokens: int) -> None:
    side.source.publish(key, component, num_tokens)


def listen_on(side: SourceSide) -> str:
    return side.source.address


async def begin(source: SourceProcess, key: JourneyKey, num_tokens: int = NUM_TOKENS, **options: Any) -> SourceInfo:
    info: SourceInfo = await source.call(begin_with, key, num_tokens, options)
    return info


def begin_with(side: SourceSide, key: JourneyKey, num_tokens: int, options: dict[str, Any]) -> SourceInfo:
    return side.begin(key, num_tokens, **options)


async def hand_over(source: SourceProcess, destination: DestinationSide, num_tokens: int = NUM_TOKENS) -> None:
    key = new_key()
    info = await begin(source, key, num_tokens)
    sent = await source.call(SourceSide.contents, key, num_tokens)
    destination.reserve_and_pull(key, num_tokens, info)
    await source.call(SourceSide.publish_all, key, num_tokens)
    result = await destination.result_of(key)
    assert destination.contents(result, num_tokens) == sent
    assert result.num_bytes == num_tokens * LAYOUT.bytes_per_token
    destination.free(key)


async def assert_freed(destination: DestinationSide) -> None:
    """The destination is as before, as far as leases go on by themselves."""
    await until(lambda: destination.destination.num_leases == 0 and destination.destination.num_quarantined == 0)
    assert_pool_is_free(destination.pool)


def release(side: SourceSide, key: JourneyKey) -> None:
    side.source.release(key.journey_id, key.attempt)
