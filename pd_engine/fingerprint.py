"""The fingerprint of an engine: two engines with the same one write the same bits for the same tokens.

It stands at the head of every block hash, and a handoff between unequal ones is refused. It covers

- the weights (below) and the fields of config.json that change the arithmetic;
- the storage dtype, with how fp16 is guarded, and the form in which prompt positions attend (`prefill_form`);
- how FP8 weights take part in products, for checkpoints that have them;
- the latent format: the components of a block with their widths, and the layout's version;
- the numerics of the ops: their build and the instruction set, as `Ops.numerics` names them.

Not covered, since it changes no bit: block size, cache size, threads, chunk size, the room for context.

**Weights.** The header of every safetensors file (names, shapes, dtypes, offsets), its size, and its data: all of it
where the files together have at most `FULL_HASH_BYTES`. Larger checkpoints are sampled: of every `SAMPLE_STRIDE_BYTES`
of a file the first `SAMPLE_BYTES`, and the file's last ones. That is 0.1 % (about 0.7 GB of DeepSeek-V3's 641 GiB, a
second or two from a fast disk). Any training run changes every sample; an edit of a few rows of one matrix can miss
them all: whoever edits a huge checkpoint that way must change the `metadata` in a header too, or the shard layout.
Files count in order of name, but not their names or folder: a copied checkpoint is the same one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import FailedPrecondition
from pd_engine.model import fp16_guard
from pd_engine.model.checkpoint import weight_files
from pd_engine.model.config import ModelConfig

FINGERPRINT_VERSION = 1
FINGERPRINT_BYTES = 16
FULL_HASH_BYTES = 256 * 1024 * 1024
SAMPLE_STRIDE_BYTES = 64 * 1024 * 1024
SAMPLE_BYTES = 64 * 1024
LATENT_FORMAT = "mla-1: normed latent, then rope key in interleaved pairs"
FP8_LATENT_FORMAT = "mla-fp8-1: e4m3 in groups of 128, float32 scales that are powers of two, rope key in bf16"
FP8_WEIGHTS = "w8a16-1: e4m3 · scale rounded to float32, kv_b_proj to the storage dtype; activations as they are"
_READ_BYTES = 1024 * 1024


def engine_fingerprint(
    path: Path, config: ModelConfig, layout: CacheLayout, *, dtype: str, prefill_form: str, numerics: str
) -> str:
    """32 hexadecimal digits. Torch-free; reads the weight files as described above.

    Raises:
        NotFound, InvalidArgument: see `weight_files`.
        FailedPrecondition: a weight file cannot be read.
    """
    description = {
        "version": FINGERPRINT_VERSION,
        "weights": weights_digest(path),
        "config": config.model_dump(mode="json", exclude={"max_position_embeddings", "dtype"}),
        "dtype": dtype,
        "fp8_weights": FP8_WEIGHTS if config.weight_format == "fp8" else None,
        **({"fp16_guard": fp16_guard.VERSION} if dtype == "fp16" else {}),
        "prefill_form": prefill_form,
        "latent_format": FP8_LATENT_FORMAT if layout.has_fp8 else LATENT_FORMAT,
        "layout_version": layout.version,
        "components": [
            [item.name, item.kind.value, item.width, item.dtype, item.first_position] for item in layout.components
        ],
        "numerics": numerics,
    }
    text = json.dumps(description, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()


def weights_digest(path: Path, *, full_hash_bytes: int = FULL_HASH_BYTES) -> str:
    """What the fingerprint says of the weight files in folder `path`. Raises like `engine_fingerprint`."""
    files = weight_files(path)
    sizes = [file.stat().st_size for file in files]
    sampled = sum(sizes) > full_hash_bytes
    digest = hashlib.blake2b(b"sampled" if sampled else b"full", digest_size=FINGERPRINT_BYTES)
    for file, size in zip(files, sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        try:
            with file.open("rb", buffering=0) as stream:
                for start, length in _samples(stream, size) if sampled else [(0, size)]:
                    _update(digest, stream, start, length)
        except OSError as error:
            raise FailedPrecondition(f"{file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _samples(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    """(start, length) of the header and of the samples of a large file."""
    header_bytes = 8 + int.from_bytes(stream.read(8), "little")
    spans = [(0, min(header_bytes, size))]
    spans += [(start, SAMPLE_BYTES) for start in range(header_bytes, size, SAMPLE_STRIDE_BYTES)]
    spans.append((max(0, size - SAMPLE_BYTES), SAMPLE_BYTES))
    return spans


def _update(digest: hashlib.blake2b, stream: BinaryIO, start: int, length: int) -> None:
    stream.seek(start)
    while length > 0:
        data = stream.read(min(length, _READ_BYTES))
        if not data:
            return
        digest.update(data)
        length -= len(data)
