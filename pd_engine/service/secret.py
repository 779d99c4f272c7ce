"""The cluster secret: whoever has it is inside the security boundary. It travels as call metadata."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from typing import Any

from pd_engine.errors import InvalidArgument

SECRET_METADATA_KEY = "pd-relay-secret"
SECRET_ENVIRONMENT = "PD_RELAY_SECRET"
MIN_SECRET_CHARS = 16
MAX_SECRET_CHARS = 256


def new_secret() -> str:
    """A fresh secret of 256 bits, printable ASCII."""
    return secrets.token_urlsafe(32)


def parse_secret(text: str) -> str:
    """Raises:
    InvalidArgument: it is too short, too long, or not printable ASCII; the message does not repeat it.
    """
    text = text.strip()
    if not MIN_SECRET_CHARS <= len(text) <= MAX_SECRET_CHARS:
        raise InvalidArgument(
            f"the cluster secret must have {MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} characters, got {len(text)}"
        )
    if not (text.isascii() and text.isprintable()):
        raise InvalidArgument("the cluster secret must be printable ASCII")
    return text


def secret_from_environment() -> str:
    """Raises:
    InvalidArgument: the variable is not set, or holds no valid secret.
    """
    text = os.environ.get(SECRET_ENVIRONMENT)
    if text is None:
        raise InvalidArgument(f"the environment variable {SECRET_ENVIRONMENT} must hold the cluster secret")
    return parse_secret(text)


def secret_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    return ((SECRET_METADATA_KEY, secret),)


def metadata_has_secret(metadata: Iterable[Any] | None, secret: str) -> bool:
    """Whether a call's metadata, pairs of (key, value), carry the secret. Takes the same time right or wrong."""
    expected = secret.encode()
    for key, value in metadata or ():
        if key == SECRET_METADATA_KEY:
            given = value if isinstance(value, bytes) else str(value).encode()
            return hmac.compare_digest(given, expected)
    return False
