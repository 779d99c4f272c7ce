"""What a command asks of the controller of a running cluster, and what it is answered: one JSON document a line.

The first line is a request; then come any number of {"progress": ...}, and last {"result": ...} or {"error": ...}.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pd_engine.errors import InvalidArgument, shown
from pd_ops.cluster.plan import Role

MAX_LINE_BYTES = 64 * 1024
MAX_WORKERS = 1024
MAX_ID_CHARS = 64
MAX_DRAIN_S = 3600.0
MAX_SPOILT_PIECES = 10_000

DrainS = Annotated[float, Field(ge=0, le=MAX_DRAIN_S)]
WorkerId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StatusRequest(_Request):
    """The processes, and what is under way."""

    command: Literal["status"] = "status"


class SettingsRequest(_Request):
    """The settings that the cluster runs with."""

    command: Literal["settings"] = "settings"


class ScaleRequest(_Request):
    """Pools are given these sizes; None: as it is."""

    command: Literal["scale"] = "scale"
    prefill: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    decode: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    drain_s: DrainS

    def wanted(self) -> dict[Role, int]:
        sizes = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: size for role, size in sizes.items() if size is not None}


class DrainRequest(_Request):
    """A worker ends, and its pool is smaller."""

    command: Literal["drain"] = "drain"
    worker: WorkerId
    drain_s: DrainS


class RollRequest(_Request):
    """Every process is replaced, one after the other. `settings`: what stands over those that the cluster has."""

    command: Literal["roll"] = "roll"
    drain_s: DrainS
    settings: dict[str, Any] = Field(default_factory=dict)


class RoleRequest(_Request):
    """A worker goes over to the other pool."""

    command: Literal["role"] = "role"
    worker: WorkerId
    role: Literal["prefill", "decode"]
    drain_s: DrainS


class SpoilRequest(_Request):
    """A prefill worker announces so many pieces more with wrong checksums; answers how many are to come."""

    command: Literal["spoil"] = "spoil"
    worker: WorkerId
    pieces: Annotated[int, Field(ge=0, le=MAX_SPOILT_PIECES)]


Request = (
    StatusRequest | SettingsRequest | ScaleRequest | DrainRequest | RollRequest | RoleRequest | SpoilRequest
)

QUESTIONS = (StatusRequest, SettingsRequest)  # answered at once; nothing is changed

_ADAPTER: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="command")])


def parse_request(line: bytes) -> Request:
    """Raises:
    InvalidArgument: it is no request.
    """
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        raise InvalidArgument(f"{where}: {first['msg']}, got {shown(first['input'])}") from None
