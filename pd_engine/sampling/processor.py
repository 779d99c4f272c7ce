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

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pd_engine.sampling.params import SamplingParams

Values = npt.NDArray[np.float32]
Table = npt.NDArray[np.void]

# What is done to the logit of one token at one place.
_ROW = np.dtype(
    [
        ("id", np.int64), ("bias", np.float32), ("repetition", np.float32), ("frequency", np.float32),
        ("presence", np.float32),
        ("count", np.float32),     # how often it was generated
        ("occurred", np.bool_),    # in the prompt, or generated
        ("ends", np.bool_),        # the request, and must not yet
    ],
    align=True,
)
NO_CHANGE: Table = np.zeros(0, dtype=_ROW)


class LogitProcessor:
    """Steps 2 to 6 for one sequence, which it follows token by token: a table of the tokens that they concern."""

    def __init__(self, params: SamplingParams, *, ending_ids: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._num_prompt_tokens = len(prompt_ids)
        self._num_generated = 0
        biased = [token for token, _ in params.logit_bias]
        ending = sorted(ending_ids) if params.min_tokens else []
        prompt = sorted(set(prompt_ids)) if params.repetition_penalty != 1 else []
        self._rows = {token: row for row, token in enumerate(dict.fromkeys([*biased, *ending, *prompt]))}
        self._table = NO_CHANGE
        self._grow(len(self._rows))
        self._table["id"] = list(self._rows)
        self._table["bias"][: len(biased)] = [bias for _, bias in params.logit_bias]
        self._table["ends"][[self._rows[token] for token in ending]] = True
        self._table["occurred"][[self._rows[token] for token in prompt]] = True

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes in the tokens that are new since the last call. `token_ids`: prompt and generated tokens."""
        for token in token_ids[self._num_prompt_tokens + self._num_generated :]:
            self._count(token)

    def table(self, drafted: Sequence[int] = ()) -> Table:
        """What is to be done to the logits behind the tokens so far and `drafted` ones; valid until the next call."""
        before = [self._count(token) for token in drafted]
        is_early = self._num_generated < self._params.min_tokens
        table = self._table[: len(self._rows) if is_early or self._params.has_edits else 0]
        if drafted or self._params.min_tokens:
            table = table.copy()
            table["ends"] &= is_early
        for token, (num_rows, occurred) in zip(reversed(drafted), reversed(before), strict=True):
            self._uncount(token, num_rows, occurred)
        return table

    def _count(self, token: int) -> tuple[int, bool]:
        """Counts a generated token; the number of rows, and whether it had occurred, before that."""
        self._num_generated += 1
        num_rows = len(self._rows)
        if not self._params.penalizes:
            return num_rows, False
        row = self._rows.setdefault(token, num_rows)
        if row == len(self._table):
            self._grow(max(64, row))
        if row == num_rows:
            self._table["id"][row] = token
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
            del self._rows[token]  # the last one

    def _grow(self, num_rows: int) -> None:
        """Adds rows of tokens that have not occurred."""
        rows = np.zeros(num_rows, dtype=_ROW)
        rows["repetition"] = self._params.repetition_penalty
        rows["frequency"] = self._params.frequency_penalty
        rows["presence"] = self._params.presence_penalty
        self._table = np.concatenate([self._table, rows])


def join(tables: Sequence[Table]) -> Table:
    """One after the other. (`np.concatenate` compares the dtypes of structured arrays field by field, each time.)"""
    joined: Table = np.empty(sum(map(len, tables)), dtype=_ROW)
    start = 0
    for table in tables:
        joined[start : start + len(table)] = table
        start += len(table)
    return joined


def process(logits: Values, table: Table) -> Values:
    """The processed logits of a table's tokens, or of several tables' one after the other."""
    bias: Values = table["bias"]
    repetition: Values = table["repetition"]
    counts: Values = table["count"]
    with np.errstate(over="ignore", invalid="ignore"):  # logits of any size, NaN too
        z = logits + bias
        z[table["ends"]] = -np.inf
        z = np.where(table["occurred"], np.where(z > 0, z / repetition, z * repetition), z)
        z = z - table["frequency"] * counts
        z = np.where(counts > 0, z - table["presence"], z)
    assert z.dtype == np.float32, z.dtype
    return z
