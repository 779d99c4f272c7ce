"""The text as token ids, split into what is learnt and what is held out, and cut into batches.

Shape suffixes: B windows, T positions.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from pd_engine.errors import InvalidArgument
from pd_ops.demo_model.prose import documents
from pd_ops.demo_model.shape import BOS_ID, EOS_ID

HELD_OUT_EVERY = 25  # of this many documents one is held out: 4 %

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Ids of all documents one after the other, each wrapped in bos and eos."""

    learnt: Ids
    held_out: Ids


def read_documents(text: Path) -> list[str]:
    """Documents of a text: a folder of reStructuredText, or a UTF-8 file (or its `.xz`) whose documents are separated
    by an empty line.

    Raises:
        InvalidArgument: it cannot be read, or holds fewer documents than a held-out part needs.
    """
    try:
        if text.is_dir():
            found = list(documents(text))
        else:
            raw = text.read_bytes()
            content = (lzma.decompress(raw) if text.suffix == ".xz" else raw).decode()
            found = [document.strip() for document in content.split("\n\n") if document.strip()]
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise InvalidArgument(f"cannot read the text {text}: {error}") from None
    if len(found) < HELD_OUT_EVERY:
        raise InvalidArgument(f"the text {text} has {len(found)} documents, at least {HELD_OUT_EVERY} are needed")
    return found


def split(found: list[str]) -> tuple[list[str], list[str]]:
    """(learnt, held out): every `HELD_OUT_EVERY`th document, the first one included, is held out."""
    return [text for i, text in enumerate(found) if i % HELD_OUT_EVERY], found[::HELD_OUT_EVERY]


def encode(tokenizer: Tokenizer, found: list[str]) -> Ids:
    """Token ids of documents, in order."""
    pieces = [[BOS_ID, *encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(found, add_special_tokens=False)]
    return np.concatenate([np.array(piece, dtype=np.uint16) for piece in pieces])


def windows(ids: Ids, *, count: int, length: int, seed: tuple[int, ...]) -> Tensor:
    """`count` windows at random places, int64 [B, T] with T = length + 2: each position has its next token and the one
    after. The seed alone decides which, so an interrupted run goes on with the windows it would have had.

    Raises:
        InvalidArgument: the text is shorter than a window.
    """
    if len(ids) <= length + 2:
        raise InvalidArgument(f"{len(ids)} tokens of text are fewer than a window of {length + 2}")
    starts = np.random.default_rng(seed).integers(0, len(ids) - length - 2, count)
    return torch.from_numpy(np.stack([ids[start : start + length + 2] for start in starts]).astype(np.int64))
