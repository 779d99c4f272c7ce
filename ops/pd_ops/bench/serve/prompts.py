"""Token ids for a traced request: the same block id gives the same tokens, so shared prefixes are shared in fact."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pd_ops.bench.serve.traced import TracedRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMaker:
    """Ids come from the middle of the vocabulary: special tokens stand at its ends.

    Attributes:
        bos: put before every prompt, as part of its length; None: nothing.
        salt: other tokens for the same trace, so that an earlier run's cache holds none of them.
    """

    vocab_size: int
    bos: int | None = 0
    salt: str = ""

    def token_ids(self, request: TracedRequest, number: int) -> list[int]:
        """Of the `number`-th request: exactly its prompt_tokens."""
        ids: list[int] = [] if self.bos is None else [self.bos]
        for block in request.prefix:
            if len(ids) >= request.prompt_tokens:
                break
            ids += self._run(f"block/{block}", request.block_tokens)
        if len(ids) < request.prompt_tokens:
            ids += self._run(f"own/{number}", request.prompt_tokens - len(ids))
        return ids[: request.prompt_tokens]

    def _run(self, name: str, count: int) -> list[int]:
        low, high = self.vocab_size // 8, max(self.vocab_size // 8 + 1, 3 * self.vocab_size // 4)
        return random.Random(f"{self.salt}/{name}").choices(range(low, high), k=count)
