"""Who calls, by bearer token, and how much each may ask for. Pure but for `Callers.load`.

A file of keys holds the SHA-256 of each token, never a token. Tokens are long and random, so a fast hash will do.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from pd_engine.priority import MAX_PRIORITY

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_TOKEN_CHARS = 512
RETRY_MS = 1_000  # where only another request's end makes room
_SCHEME = "bearer"


class Caller(BaseModel):
    """One key of the file.

    Attributes:
        max_running_requests: choices at once; None: as the router allows.
        tokens_per_minute: prompt and generated tokens; None: no limit.
        min_priority: the most urgent priority that its requests may have; None: any.
        cache: whose cached blocks it may use: all keys with the same one share them; None: only its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    max_running_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    min_priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,64}$")

    def salt(self, cache_salt: str) -> str:
        """What separates its cached blocks from those of others, whatever salts these choose. Without keys, the
        client's own."""
        if not self.name:
            return cache_salt
        scope = f"key {self.name}" if self.cache is None else f"cache {self.cache}"
        return hashlib.blake2b(f"{scope}/{cache_salt}".encode(), digest_size=16).hexdigest()  # no scope has a slash

    def check_priority(self, priority: int) -> None:
        """Raises:
        InvalidArgument: it is more urgent than this key may ask for.
        """
        if self.min_priority is not None and priority < self.min_priority:
            raise InvalidArgument(f"priority must be at least {self.min_priority} with this API key, got {priority}")


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    keys: Annotated[list[Caller], Field(min_length=1, max_length=10_000)]


ANYONE = Caller.model_construct(name="", sha256="")


class Callers:
    """Tells callers by their tokens. Without keys everybody is let in, as `ANYONE`."""

    def __init__(self, callers: Sequence[Caller]) -> None:
        """Raises:
        InvalidArgument: a name or a hash is there twice.
        """
        for what, values in (("name", [c.name for c in callers]), ("sha256", [c.sha256 for c in callers])):
            if len(set(values)) < len(values):
                raise InvalidArgument(f"api_keys: each key must have a {what} of its own")
        self._callers = [(bytes.fromhex(caller.sha256), caller) for caller in callers]

    @staticmethod
    def load(path: str | None) -> Callers:
        """Raises:
        InvalidArgument: the file cannot be read or does not hold keys; the message repeats none of its values.
        """
        if path is None:
            return Callers([])
        try:
            return Callers(_KeyFile.model_validate_json(read_bounded(Path(path), MAX_FILE_BYTES)).keys)
        except OSError as error:
            raise InvalidArgument(f"cannot read the API keys in {path}: {error.strerror}") from None
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise InvalidArgument(f"{path} is no file of API keys: {where}: {problem['msg']}") from None

    @property
    def are_open(self) -> bool:
        """Whether nobody needs a key."""
        return not self._callers

    def of(self, authorization: str | None) -> Caller:
        """Of "Bearer TOKEN". It takes the same time whichever key it is, and whether it is one.

        Raises:
            Unauthenticated: it is none; the message does not repeat it.
        """
        if self.are_open:
            return ANYONE
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != _SCHEME or not 0 < len(token) <= MAX_TOKEN_CHARS:
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY")
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found: Caller | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthenticated("the API key is not known here")
        return found


@dataclass(slots=True)
class _Account:
    """`tokens`: what is left of the minute's, as of `at_s`; below 0 what was used beyond them."""

    tokens: float
    at_s: float
    num_running: int = 0


class CallerLimits:
    """What each caller uses. Tokens come back evenly, a minute's worth at most; a prompt's are taken when it is let in,
    generated ones when their choice has ended. A request is let in while any are left, so what it takes beyond them
    has to come back before the next one."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def admit(self, caller: Caller, *, num_choices: int, num_prompt_tokens: int, now_s: float) -> None:
        """Counts a request from now on.

        Raises:
            InvalidArgument: it has more choices than the caller may ever have.
            ResourceExhausted: a limit is reached; with a hint when it is not.
        """
        account = self._account(caller, now_s)
        most = caller.max_running_requests
        if most is not None and num_choices > most:
            raise InvalidArgument(f"the request has {num_choices} choices; this API key may have {most} at once")
        if most is not None and account.num_running + num_choices > most:
            self._refuse(f"this API key has {account.num_running} choices running; it may have {most}", RETRY_MS)
        if caller.tokens_per_minute is not None and account.tokens <= 0:
            wait_ms = round((1 - account.tokens) * 60_000 / caller.tokens_per_minute)
            self._refuse(f"this API key has used its {caller.tokens_per_minute} tokens a minute", wait_ms)
        account.num_running += num_choices
        account.tokens -= num_prompt_tokens

    def note_end(self, caller: Caller, *, num_generated: int, now_s: float) -> None:
        """One choice has ended."""
        account = self._account(caller, now_s)
        account.num_running -= 1
        account.tokens -= num_generated
        assert account.num_running >= 0, caller.name

    def _account(self, caller: Caller, now_s: float) -> _Account:
        most = float(caller.tokens_per_minute or 0)
        account = self._accounts.setdefault(caller.name, _Account(tokens=most, at_s=now_s))
        account.tokens = min(most, account.tokens + (now_s - account.at_s) * most / 60)
        account.at_s = now_s
        return account

    @staticmethod
    def _refuse(message: str, retry_after_ms: int) -> None:
        raise ResourceExhausted(message, retry_after_ms=max(1, retry_after_ms))
