"""What is done to a row of logits before a token is chosen from it. Torch-free.

The whole of it, in vLLM's order (vllm/v1/sample/sampler.py, the steps of `Sampler`; the formulas are those of its
`apply_penalties`, OpenAI's for the last two):

1. Logprobs, where they were asked for, are of the logits as the model gave them.
2. logit_bias: z += bias of the token.
3. min_tokens: z = -inf for all tokens that end the request, while fewer tokens have been generated.
4. repetition_penalty r, of tokens in the prompt or generated: z = z / r where z > 0, else z · r.
5. frequency_penalty: z -= penalty · (how often the token was generated).
6. presence_penalty: z -= penalty, of generated tokens.
7. Temperature, min-p, top-k, top-p, noise, argmax: the op `sample` (pd_kernels.sample.reference).

Steps 2 to 6 are here: one IEEE operation in float32 each, on the few tokens that they concern, so that every
implementation of the ops samples from the same bits. They depend on token ids alone: a resumed sequence rebuilds them
from the prompt and the tokens that were emitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from pd_engine.sampling.params import SamplingParams

Values = npt.NDArray[np.float32]

_ROW = np.dtype(
    [("id", np.int64), ("bias", np.float32), ("count", np.float32), ("occurred", np.bool_), ("ends", np.bool_)],
    align=True,
)


class LogitProcessor:
    """Steps 2 to 6 for one sequence, which it follows token by token.

    The tokens of the vocabulary that a step concerns have a row each in a table: bias, how often generated, whether
    it has occurred (in the prompt or generated), whether it ends the request.
    """

    def __init__(self, params: SamplingParams, *, ending_ids: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._num_generated = 0
        biased = [token for token, _ in params.logit_bias]
        ending = sorted(ending_ids) if params.min_tokens else []
        prompt = sorted(set(prompt_ids)) if params.repetition_penalty != 1 else []
        self._rows = {token: row for row, token in enumerate(dict.fromkeys([*biased, *ending, *prompt]))}
        self._table = np.zeros(len(self._rows), dtype=_ROW)
        self._table["id"] = list(self._rows)
        self._table["bias"][: len(biased)] = [bias for _, bias in params.logit_bias]
        self._table["ends"][[self._rows[token] for token in ending]] = True
        self._table["occurred"][[self._rows[token] for token in prompt]] = True

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The tokens whose logits may change now, each once."""
        params = self._params
        changes_now = params.penalizes or bool(params.logit_bias) or self._num_generated < params.min_tokens
        return np.ascontiguousarray(self._table["id"][: len(self._rows) if changes_now else 0])

    def follow(self, generated_ids: Sequence[int]) -> None:
        """Takes in the tokens that are new since the last call."""
        for token in generated_ids[self._num_generated :]:
            self._count(token)

    @contextmanager
    def assuming(self, drafted: Sequence[int]) -> Iterator[None]:
        """Within the block it is as if these tokens had been generated, too."""
        before = [self._count(token) for token in drafted]
        try:
            yield
        finally:
            for token, (num_rows, occurred) in reversed(list(zip(drafted, before, strict=True))):
                self._uncount(token, num_rows, occurred)

    def process(self, logits: Values) -> Values:
        """The processed logits of `token_ids`, whose logits are given; float32."""
        params, rows = self._params, self._table[: len(logits)]
        counts: Values = rows["count"]
        with np.errstate(over="ignore", invalid="ignore"):  # logits of any size, NaN too
            z: Values = logits + rows["bias"]
            if self._num_generated < params.min_tokens:
                z[rows["ends"]] = -np.inf
            if params.repetition_penalty != 1:
                penalty = np.array([params.repetition_penalty], dtype=np.float32)
                z = np.where(rows["occurred"], np.where(z > 0, z / penalty, z * penalty), z)
            if params.frequency_penalty:
                z = z - np.float32(params.frequency_penalty) * counts
            if params.presence_penalty:
                z = np.where(counts > 0, z - np.float32(params.presence_penalty), z)
        assert z.dtype == np.float32, z.dtype
        return z

    def _count(self, token: int) -> tuple[int, bool]:
        """Counts a generated token; the number of rows, and whether it had occurred, before that."""
        self._num_generated += 1
        num_rows = len(self._rows)
        if not self._params.penalizes:
            return num_rows, False
        row = self._rows.setdefault(token, num_rows)
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.zeros(max(64, row), dtype=_ROW)])
        if row == num_rows:
            self._table[row] = (token, 0, 0, False, False)
        occurred = bool(self._table["occurred"][row])
        self._table["occurred"][row] = True
        self._table["count"][row] += 1
        return num_rows, occurred

    def _uncount(self, token: int, num_rows: int, occurred: bool) -> None:
        """Takes back the last `_count`."""
        self._num_generated -= 1
        if not self._params.penalizes:
            return
        row = self._rows[token]
        self._table["occurred"][row] = occurred
        self._table["count"][row] -= 1
        if len(self._rows) > num_rows:
            del self._rows[token]
