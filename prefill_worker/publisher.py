"""Binds one prompt to its handoff: what the compute thread publishes, and the closing part."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing, HiddenState
from kv_transfer.source import HandoffSource
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.service.wire import finish_names


def hidden_state(pending_hidden: Tensor, dtype: str) -> HiddenState:
    """The last row of `pending_hidden` [n, D] as bytes."""
    row_D = pending_hidden[-1].contiguous()
    return HiddenState(data=row_D.view(torch.uint8).cpu().numpy().tobytes(), dtype=dtype, width=row_D.numel())


class HandoffPublisher:
    """A `Publisher` over a `HandoffSource`; its calls may come from the compute thread.

    Args:
        hidden_dtype: of the state that an MTP layer continues from; None without one.
        num_cached_tokens: of the prompt, that are not computed for it.
    """

    def __init__(
        self, source: HandoffSource, key: JourneyKey, hidden_dtype: str | None, *, num_cached_tokens: int
    ) -> None:
        self._source = source
        self._key = key
        self._hidden_dtype = hidden_dtype
        self._num_cached_tokens = num_cached_tokens

    def publish_cached(self, num_blocks: int) -> None:
        """Leading blocks that were final before anything is computed."""
        layout = self._source.layout
        for component in range(len(layout.components) if num_blocks else 0):
            self.publish(component, num_blocks * layout.block_size)

    def publish(self, component: int, num_valid_tokens: int) -> None:
        self._source.publish(self._key, component, num_valid_tokens)

    def finish(self, prompt: Sequence, first: SampledToken) -> None:
        hidden = None
        if self._hidden_dtype is not None:
            assert prompt.pending_hidden is not None, prompt.name
            hidden = hidden_state(prompt.pending_hidden, self._hidden_dtype)
        self._source.finish(
            self._key,
            Closing(
                first_token_id=first.token_id,
                num_prompt_tokens=prompt.num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
                logprobs=first.logprobs,
                finish_reason=prompt.finish_reason(),
                stop_reason=finish_names(prompt)[1],
                hidden=hidden,
            ),
        )
