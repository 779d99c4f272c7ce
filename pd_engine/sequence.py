"""One choice of a request on its way through one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pd_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from pd_engine.sampling.processor import LogitProcessor


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Of one sampled token, natural logarithms of the unprocessed distribution, float32 values.

    `top` holds the most likely (token id, logprob), best first, ties to the lowest id.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """A token that the target model chose, and its logprobs if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(kw_only=True, slots=True)
class Sequence:
    """The engine's view of one choice. `token_ids` grows as tokens are sampled; blocks are given by the caller.

    Attributes:
        name: the journey's id, or any other label: for logs and block owners.
        token_ids: prompt and generated tokens.
        num_prompt_tokens: how many of them are the prompt; a resume's emitted tokens count as generated.
        params: sampling.
        ending_ids: token ids that end it (stop tokens, and eos unless ignored).
        speculate: draft tokens a step for this sequence, already resolved; 0 is off.
        block_ids: its blocks in order; must cover every slot that a step writes.
        num_computed: leading positions whose main-layer latents are final.
        num_computed_mtp: leading positions whose MTP latents are final (slot 0 counts: it is zero by definition);
            stays behind where the engine has no MTP layer, or once the sequence decodes without speculation.
        pending_hidden: rows h, post final norm, [n, D] in the engine's dtype; the last one is that of position
            num_computed-1, from which the next token is sampled. While speculation is possible they are those of
            positions num_computed_mtp-1 .. num_computed-1: what the MTP layer still has to be run on. None before
            anything has been computed.
        num_drafted, num_accepted: totals of speculation.
        processor: of its logits, once it was needed; a function of the params and token ids.
    """

    name: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    ending_ids: frozenset[int]
    speculate: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_computed_mtp: int = 0
    pending_hidden: Tensor | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    processor: LogitProcessor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def finish_reason(self) -> FinishReason | None:
        """Why it has ended after its last token, or None if it goes on."""
        if self.num_generated and self.token_ids[-1] in self.ending_ids:
            return FinishReason.STOP
        if self.num_generated >= self.params.max_tokens:
            return FinishReason.LENGTH
        return None
