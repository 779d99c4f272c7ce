"""Who of a source's admitted pullers goes when there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from kv_transfer.transport import Authorize

MAX_A_TOKEN = 16

Member = TypeVar("Member")


def first_to_go(tokens: Mapping[Member, str], authorize: Authorize) -> Member:
    """Of those whose token has ended, or of all if none has, the first one with the token that most of them have.

    Args:
        tokens: by member, at least one; who should rather go comes first.
    """
    has_ended = {token: authorize(token) is None for token in set(tokens.values())}
    num_members = Counter(tokens.values())
    return max(tokens, key=lambda member: (has_ended[tokens[member]], num_members[tokens[member]]))
