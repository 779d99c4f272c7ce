"""Requests that are sent to a cluster for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from pd_engine.errors import Unavailable
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import RouterClient
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.remote import (
    Request,
    cold_placements,
    is_local,
    run_remote,
    verified_placements,
    warm_placement,
)


class FailingClient:
    async def complete(self, request: Any, on_chunk: Callable[..., None] | None = None) -> Any:
        raise Unavailable("no prefill worker is ready")


async def test_the_first_failure_comes_out_as_the_typed_error_itself() -> None:
    requests = [Request(prompt=TokensPrompt(token_ids=(1, 2)), sampling=SamplingFields())] * 3
    placements = cold_placements([("prefill-0", "decode-0")], 3)
    with pytest.raises(Unavailable, match="no prefill worker is ready"):
        await run_remote(cast(RouterClient, FailingClient()), requests, placements, concurrency=2)


def test_placements_go_over_all_pairs_in_turn_and_warm_ones_stay_where_the_blocks_are() -> None:
    pairs = [("prefill-0", "decode-0"), ("prefill-1", "decode-0")]
    cold = cold_placements(pairs, 3)
    assert [placement.prefill_worker for placement in cold] == ["prefill-0", "prefill-1", "prefill-0"]
    assert all(placement.bypass_prefix_cache and placement.report_block_checksums for placement in cold)
    warm = warm_placement(cold[1])
    assert (warm.prefill_worker, warm.decode_worker) == pairs[1]
    assert (warm.bypass_prefix_cache, warm.report_block_checksums) == (False, True)
    assert cold[1].bypass_prefix_cache
    verified = verified_placements(pairs, 5)
    places = ["prefill-0", "prefill-1", "decode-0", "prefill-1", "prefill-0"]
    assert [placement.prefill_worker for placement in verified] == places
    assert [is_local(placement) for placement in verified] == [False, False, True, False, False]
