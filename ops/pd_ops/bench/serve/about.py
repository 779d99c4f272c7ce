"""What a serving result is a result of. Without all of it nothing is printed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pd_engine.bounded_file import read_bounded
from pd_engine.contracts import api_pb2
from pd_engine.errors import InvalidArgument, NotFound
from pd_engine.fingerprint import weights_digest
from pd_engine.model.checkpoint import resolve_model
from pd_ops.bench.identity import identity, identity_text
from pd_ops.output import Document

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What an endpoint serves; None: not known, and so has to be said.

    Attributes:
        checkpoint: its folder. precision: of weights and computation.
        fingerprint: of pd-relay's engine; equal ones write equal bits. Other engines have none.
        topology: how many workers of which kind, where. settings: all of them.
        prefill_form: null: the engine has none.
    """

    engine: str | None = None
    checkpoint: str | None = None
    precision: str | None = None
    max_context: int | None = None
    vocab_size: int | None = None
    topology: Document | None = None
    settings: Document | None = None
    prefill_form: str | None = None
    allow_rounding_reuse: bool = False
    fingerprint: str | None = None


def served_by_router(model: api_pb2.GetModelInfoResponse, server: api_pb2.GetServerInfoResponse) -> Served:
    """As a router tells it."""
    settings: Document = json.loads(server.settings_json) if server.settings_json else {}
    engine = settings.get("engine", {})
    latents = engine.get("latent_dtype", "auto")
    return Served(
        engine=f"pd-relay {server.version}", checkpoint=model.model_path,
        precision=model.dtype + ("" if latents == "auto" else f", {latents} latents") if model.dtype else None,
        max_context=model.max_context_length or None, vocab_size=model.vocab_size or None,
        topology=_topology(server), settings=settings or None, prefill_form=engine.get("prefill_form"),
        allow_rounding_reuse=bool(engine.get("allow_rounding_reuse", False)), fingerprint=model.fingerprint or None,
    )


def _topology(server: api_pb2.GetServerInfoResponse) -> Document:
    return {
        **{role: sum(worker.role == role for worker in server.workers) for role in ("prefill", "decode")},
        "hosts": sorted({worker.host for worker in server.workers}),
        "ops": sorted({worker.ops_backend for worker in server.workers if worker.ops_backend}),
    }


def serving_identity(served: Served, *, max_new_tokens: int, sampling: Document) -> Document:
    """The identity of a result. `host` is that of the load generator.

    Raises:
        InvalidArgument: something is not known, and with which flag to say it.
        NotFound: the checkpoint is not on this host.
    """
    flags = {
        "engine": "--engine", "checkpoint": "--checkpoint", "precision": "--precision", "max_context": "--max-context",
        "topology": "--topology", "settings": "--engine-setting", "vocab_size": "--checkpoint",
    }
    values = asdict(served)
    if missing := [f"{name} ({flag})" for name, flag in flags.items() if values[name] is None]:
        raise InvalidArgument(
            f"a result needs its identity, and this endpoint does not tell all of it: give {', '.join(missing)}"
        )
    assert served.checkpoint is not None
    path = _path(served.checkpoint)
    return {
        **values, "checkpoint": str(path), **_hashes(path), "max_new_tokens": max_new_tokens, "sampling": sampling,
        "host": identity(),
    }


def _path(checkpoint: str) -> Path:
    try:
        return resolve_model(checkpoint)
    except NotFound:
        raise NotFound(
            f"the checkpoint {checkpoint!r} is not on this host, so its hash is not known: give --checkpoint PATH"
        ) from None


def _hashes(path: Path) -> Document:
    try:
        tokenizer = hashlib.blake2b(read_bounded(path / TOKENIZER_FILE, MAX_TOKENIZER_BYTES), digest_size=16)
    except OSError as error:
        raise NotFound(f"{path / TOKENIZER_FILE} cannot be read: {error.strerror}") from None
    return {"weights_hash": weights_digest(path), "tokenizer_hash": tokenizer.hexdigest()}


def text_of(document: Document) -> str:
    """For people."""
    settings, reuse = document["settings"], "allowed" if document["allow_rounding_reuse"] else "not allowed"
    return "\n".join([
        f"{document['engine']}: {document['checkpoint']} (weights {document['weights_hash'][:12]}, tokenizer "
        f"{document['tokenizer_hash'][:12]}), {document['precision']}, context {document['max_context']:,}, answers up "
        f"to {document['max_new_tokens']:,}",
        f"prefill form {document['prefill_form'] or '-'}, rounding reuse {reuse}, sampling "
        f"{_flat_text(document['sampling'])}",
        f"topology {_flat_text(document['topology'])}; {len(flat(settings))} settings in the JSON",
        identity_text(document["host"]),
    ])


def without_path(document: Document) -> Document:
    """For a page that others read: the checkpoint by its folder's name, as its hash says which one it is."""
    return {**document, "checkpoint": Path(document["checkpoint"]).name}


def _flat_text(document: Document) -> str:
    return ", ".join(f"{name} {value}" for name, value in flat(document).items())


def flat(document: Any, prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} of nested objects; lists are values."""
    if not isinstance(document, dict):
        return {prefix: document}
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found
