"""Binds one prompt to its handoff: what the compute thread publishes, and the closing part."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing, HiddenState
from kv_transfer.source import HandoffSource
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.service.wire import finish_names

def hidden_state(pending_hidden: Tensor | None, dtype: str) -> HiddenState | None:
    """The last row of `pending_hidden` [n, D] as bytes; None without an MTP layer."""
    if pending_hidden is None:
        return None
    row_D = pending_hidden[-1].contiguous()
    return HiddenState(data=row_D.view(torch.uint8).numpy().tobytes(), dtype=dtype, width=row_D.numel())


class HandoffPublisher:
    """A `Publisher` over a `HandoffSource`; its calls may come from the compute thread."""

    def __init__(self, source: HandoffSource, key: JourneyKey, dtype: str) -> None:
        self._source = source
        self._key = key
        self._dtype = dtype

    def publish(self, component: int, num_valid_tokens: int) -> None:
        self._source.publish(self._key, component, num_valid_tokens)

    def finish(self, prompt: Sequence, first: SampledToken) -> None:
        self._source.finish(
            self._key,
            Closing(
                first_token_id=first.token_id,
                num_prompt_tokens=prompt.num_prompt_tokens,
                logprobs=first.logprobs,
                finish_reason=prompt.finish_reason(),
                stop_reason=finish_names(prompt)[1],
                hidden=hidden_state(prompt.pending_hidden, self._dtype),
            ),
        )
