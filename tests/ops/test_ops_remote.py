"""Requests that are sent to a cluster for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from pd_engine.errors import Unavailable
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import RouterClient
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.remote import Request, run_remote


class FailingClient:
    async def complete(self, request: Any, on_chunk: Callable[..., None] | None = None) -> Any:
        raise Unavailable("no prefill worker is ready")


async def test_the_first_failure_comes_out_as_the_typed_error_itself() -> None:
    requests = [Request(prompt=TokensPrompt(token_ids=(1, 2)), sampling=SamplingFields())] * 3
    with pytest.raises(Unavailable, match="no prefill worker is ready"):
        await run_remote(cast(RouterClient, FailingClient()), requests, [("prefill-0", "decode-0")], concurrency=2)
