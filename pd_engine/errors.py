"""Every error that crosses a process boundary: one code, one gRPC status, one HTTP status, one exit code.

A user's mistake, a full system and a dead peer are told apart by their class; a broken invariant is an `assert`
and becomes `Internal` at the process boundary.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import grpc


class ErrorCode(Enum):
    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    FAILED_PRECONDITION = "failed_precondition"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNAUTHENTICATED = "unauthenticated"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    GONE = "gone"
    DATA_LOSS = "data_loss"
    INTERNAL = "internal"


GRPC_STATUS: dict[ErrorCode, grpc.StatusCode] = {
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.GONE: grpc.StatusCode.NOT_FOUND,
    ErrorCode.DATA_LOSS: grpc.StatusCode.DATA_LOSS,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.ALREADY_EXISTS: 409,
    ErrorCode.FAILED_PRECONDITION: 412,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.CANCELLED: 499,
    ErrorCode.GONE: 410,
    ErrorCode.DATA_LOSS: 500,
    ErrorCode.INTERNAL: 500,
}

MAX_SHOWN_CHARS = 100

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_CLUSTER = 3

_USAGE_CODES = frozenset(
    {ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.FAILED_PRECONDITION, ErrorCode.ALREADY_EXISTS}
)

GONE_DETAIL = "gone"

_FINAL_STATUSES = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OUT_OF_RANGE}
)


def shown(value: object) -> str:
    """A value that somebody sent, as a message shows it: a text as it is, all else as Python writes it; its beginning
    if it is long.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python writes no integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


class PdRelayError(Exception):
    """Base of all typed errors. `message` says what was wrong and what is allowed, in one sentence or two."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    @property
    def grpc_status(self) -> grpc.StatusCode:
        return GRPC_STATUS[self.code]

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def exit_code(self) -> int:
        return EXIT_USAGE if self.code in _USAGE_CODES else EXIT_CLUSTER

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed if the router places it again."""
        return self.code in _RETRYABLE_CODES


class InvalidArgument(PdRelayError):
    code = ErrorCode.INVALID_ARGUMENT


class NotFound(PdRelayError):
    code = ErrorCode.NOT_FOUND


class AlreadyExists(PdRelayError):
    code = ErrorCode.ALREADY_EXISTS


class FailedPrecondition(PdRelayError):
    code = ErrorCode.FAILED_PRECONDITION


class ResourceExhausted(PdRelayError):
    code = ErrorCode.RESOURCE_EXHAUSTED


class Unauthenticated(PdRelayError):
    code = ErrorCode.UNAUTHENTICATED


class Unavailable(PdRelayError):
    code = ErrorCode.UNAVAILABLE


class DeadlineExceeded(PdRelayError):
    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(PdRelayError):
    code = ErrorCode.CANCELLED


class Gone(PdRelayError):
    """Belongs to an older attempt, another epoch, or something already released."""

    code = ErrorCode.GONE

    def __init__(self, message: str = GONE_DETAIL) -> None:
        super().__init__(message)


class DataLoss(PdRelayError):
    """Bytes that were fetched do not match their checksum or generation."""

    code = ErrorCode.DATA_LOSS


class Internal(PdRelayError):
    code = ErrorCode.INTERNAL


_RETRYABLE_CODES = frozenset(
    {ErrorCode.UNAVAILABLE, ErrorCode.GONE, ErrorCode.DATA_LOSS, ErrorCode.RESOURCE_EXHAUSTED}
)

ERROR_CLASSES: dict[ErrorCode, type[PdRelayError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, ResourceExhausted, Unauthenticated,
        Unavailable, DeadlineExceeded, Cancelled, Gone, DataLoss, Internal,
    )
}


def from_code(code: str, message: str) -> PdRelayError:
    """The error that another process described by its code; an unknown code becomes `Internal`."""
    try:
        cls = ERROR_CLASSES[ErrorCode(code)]
    except ValueError:
        return Internal(f"{message} (unknown error code {code!r})")
    return cls(message)


def from_grpc(error: grpc.RpcError) -> PdRelayError:
    """The typed error behind a failed gRPC call.

    Of the statuses that this system never sends, those that another try would only repeat become `FailedPrecondition`,
    the rest `Unavailable`.
    """
    status = error.code() if isinstance(error, grpc.Call) or hasattr(error, "code") else None
    details = (error.details() if hasattr(error, "details") else None) or str(error)
    if status is grpc.StatusCode.NOT_FOUND and details == GONE_DETAIL:
        return Gone()
    for code, grpc_status in GRPC_STATUS.items():
        if grpc_status is status and code is not ErrorCode.GONE:
            return ERROR_CLASSES[code](details)
    message = f"{status.name if status else 'no status'}: {details}"
    return FailedPrecondition(message) if status in _FINAL_STATUSES else Unavailable(message)
