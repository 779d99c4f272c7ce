"""Names that nobody can guess: of lives, leases, capabilities and journeys."""

from __future__ import annotations

import secrets
from collections.abc import Callable

NewId = Callable[[], str]
"""Makes a name of 32 hexadecimal digits that was never used before."""


def random_id() -> str:
    return secrets.token_hex(16)
