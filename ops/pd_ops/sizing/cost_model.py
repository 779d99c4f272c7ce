"""What work takes: prompts, decode steps, handoffs. Fitted from a measurement, or from a roofline. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import InvalidArgument, NotFound
from pd_ops.bench.measured_process import Document

MAX_FILE_BYTES = 1 << 20
MAX_QUANTILES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Milliseconds.

    Attributes:
        source: in words, what it was made from.
        door_ms: of a first token: what hangs neither on the prompt nor on what waits before it.
        prefill_step_ms: of a step of chunks, however small.
        prefill_ms_per_token: of a chunk. prefill_ms_per_pair: and for each token that stands before it in its prompt.
        decode_step_ms: of a decode step, however small.
        decode_ms_per_sequence: in it. decode_ms_per_slot: and for each token in the cache of its sequences.
        handoff_ms: from when a prompt has been computed until its sequence may join a batch.
        tokens_per_step: that a sequence gets of a decode step: 1, and accepted drafts.
        bytes_per_slot: of the cache, to turn memory into room; 0: not known.
        first_late: by how much first tokens come later than that all adds up to, or earlier where it is below 0: times
            the root of what prompt and doors take alone, as what is made of many parts varies.
        decode_spread: what a step takes of what it should take. Both are quantiles in equal steps, from which one is
            drawn each time.
        most_prompt_tokens, most_sequences: that the measurement had, in a prompt and at a decode worker; 0: no bound
            is known. fit_limit: in words, what the measurement did not tell; empty: nothing.
    """

    source: str
    door_ms: float = 0.0
    prefill_step_ms: float = 0.0
    prefill_ms_per_token: float
    prefill_ms_per_pair: float = 0.0
    decode_step_ms: float
    decode_ms_per_sequence: float = 0.0
    decode_ms_per_slot: float = 0.0
    handoff_ms: float = 0.0
    tokens_per_step: float = 1.0
    bytes_per_slot: int = 0
    first_late: tuple[float, ...] = (0.0,)
    decode_spread: tuple[float, ...] = (1.0,)
    most_prompt_tokens: int = 0
    most_sequences: float = 0.0
    fit_limit: str = ""

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Of one step: (tokens before it in its prompt, tokens) of each chunk."""
        total_ms = self.prefill_step_ms
        for start, count in chunks:
            total_ms += count * (self.prefill_ms_per_token + self.prefill_ms_per_pair * (start + count / 2))
        return total_ms / 1e3

    def prompt_alone_ms(self, num_cached: int, num_tokens: int) -> float:
        """A first token, of a prompt that shares no step and waits for nobody, in one step."""
        return self.door_ms + 1e3 * self.prefill_s([(num_cached, num_tokens - num_cached)])

    def decode_s(self, num_sequences: int, num_slots: float) -> float:
        """Of one step, with so many tokens in the caches of its sequences together."""
        return (self.decode_step_ms + num_sequences * self.decode_ms_per_sequence
                + num_slots * self.decode_ms_per_slot) / 1e3

    @property
    def tokens_per_s_of_prefill(self) -> float:
        """Of short prompts, in full steps."""
        return 1e3 / self.prefill_ms_per_token

    def to_json(self) -> Document:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Document) -> CostModel:
        """Raises:
        InvalidArgument: it is none.
        """
        known = {each.name for each in fields(cls)}
        try:
            if unknown := sorted(document.keys() - known):
                raise ValueError(f"unknown: {', '.join(map(str, unknown))}")
            values: dict[str, Any] = {name: _value(name, value) for name, value in document.items()}
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(f"this is no cost model: {error}") from None


def _value(name: str, value: object) -> object:
    if name in ("source", "fit_limit"):
        return str(value)[:500]
    if name in ("first_late", "decode_spread"):
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_QUANTILES:
            raise ValueError(f"{name} must be a list of 1 to {MAX_QUANTILES} numbers")
        return tuple(_number(name, each, least=-1e12 if name == "first_late" else 0.0) for each in value)
    if name in ("bytes_per_slot", "most_prompt_tokens"):
        return int(_number(name, value))
    number = _number(name, value)
    if number <= 0 and name in ("prefill_ms_per_token", "tokens_per_step"):
        raise ValueError(f"{name} must be above 0, got {number}")
    return number


def _number(name: str, value: object, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e12:
        raise ValueError(f"{name} must be a number, {least:g} or more, got {str(value)[:40]}")
    return float(value)


def read_cost(path: Path) -> CostModel:
    """Raises:
    NotFound: there is no such file.
    InvalidArgument: it is no cost model.
    """
    if not path.is_file():
        raise NotFound(f"no cost model {path}")
    try:
        document = json.loads(read_bounded(path, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgument(f"{path} is no JSON object")
    return CostModel.from_json(document)


class Dice:
    """Draws how much later or earlier than expected things are, from a seed."""

    def __init__(self, cost: CostModel, seed: int) -> None:
        self._random = Random(f"sizing/{seed}")
        self._first = cost.first_late
        self._decode = cost.decode_spread

    def first_late(self) -> float:
        return self._drawn(self._first)

    def decode(self) -> float:
        return self._drawn(self._decode)

    def _drawn(self, quantiles: Sequence[float]) -> float:
        if len(quantiles) == 1:
            return quantiles[0]
        at = self._random.random() * (len(quantiles) - 1)
        low = int(at)
        return quantiles[low] + (at - low) * (quantiles[low + 1] - quantiles[low])
