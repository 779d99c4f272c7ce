"""The settings file: every key with its default, parsed once. A part of the system is given its own section only.

Unknown keys are refused with the nearest known one, so that a typo never silently means the default.
"""

from __future__ import annotations

import difflib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pd_engine.errors import InvalidArgument, shown
from pd_engine.hashing import DEFAULT_BLOCK_SIZE
from pd_engine.sampling.params import MAX_SPECULATE
from pd_engine.yaml_file import read_yaml_mapping

CLUSTER_NAME = r"^[a-z0-9][a-z0-9-]{0,31}$"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class EngineSettings(Section):
    """Model, numerics and cache of a worker, and of `pd-relay generate`."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="storage dtype; auto: the checkpoint's; fp16: with a residual stream that is kept smaller, "
        "and on CPUs by the reference ops only"
    )
    latent_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="of the cache; auto: the storage dtype; fp8: 656 bytes a token and layer instead of 1,152"
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="where workers compute and keep their caches; cuda: on a Hopper GPU, with the Triton kernels"
    )
    ops: Literal["auto", "cpu", "reference", "triton"] = Field(
        "auto", description="implementation of the ops; auto: the compiled CPU ops if they are built, and it says so; "
        "on a GPU the Triton kernels"
    )
    threads: int = Field(1, ge=1, le=256, description="compute threads of a worker")
    block_size: int = Field(DEFAULT_BLOCK_SIZE, ge=1, le=1024, description="tokens a block")
    cache_mib: int = Field(128, ge=1, description="memory for blocks, MiB a worker")
    max_context_length: int | None = Field(None, ge=2, description="tokens; none: the checkpoint's own maximum")
    prefill_form: Literal["absorbed", "expanded"] = Field("absorbed", description="arithmetic of prompt positions")
    chunk_tokens: int = Field(256, ge=1, description="prompt tokens computed in one step at most")
    watch_every: int = Field(
        0, ge=0, le=1_000_000,
        description="of so many steps of a worker one is timed by stage, and its experts counted; 0: none",
    )
    prefix_cache: bool = Field(
        True, description="workers keep blocks while there is room, for requests that begin with the same tokens"
    )


class PrefillSettings(Section):
    """The pool that reads prompts."""

    workers: int = Field(1, ge=1, le=1024, description="processes in this pool")
    max_queued_tokens: int = Field(1_000_000, ge=1, description="prompt tokens that wait at one worker at most")


class DecodeSettings(Section):
    """The pool that continues them."""

    workers: int = Field(1, ge=1, le=1024, description="processes in this pool")
    max_batch: int = Field(64, ge=1, le=4096, description="sequences in one step at most")
    speculate: int = Field(1, ge=0, le=MAX_SPECULATE, description="draft tokens a step; 0 without an MTP layer")
    adaptive_speculation: bool = Field(
        True, description="fewer drafts, or none, where measured steps say that so many do not pay; tokens are the same"
    )
    itl_budget_ms: float = Field(
        50.0, gt=0,
        description="between two tokens of a sequence, while the worker computes prompts itself beside them: it takes "
        "chunks that fit",
    )
    projected_tokens: int = Field(
        256, ge=0,
        description="generated tokens that a choice has blocks for when it is admitted, at most; more as it grows; "
        "0: all of its max_tokens",
    )
    host_cache_mib: int = Field(
        128, ge=0,
        description="memory for sequences that wait for room, MiB a worker; what finds none there is computed again",
    )


class RouterSettings(Section):
    """The process that clients speak to."""

    host: str = Field("127.0.0.1", description="address that both doors listen on")
    grpc_port: int = Field(50051, ge=0, le=65535, description="0: any free port")
    http_port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    served_model_name: str | None = Field(None, description="none: the last part of the model's path")
    tls_cert: str | None = Field(
        None, description="PEM file with the certificate chain of both doors, a full path; none: plain text"
    )
    tls_key: str | None = Field(None, description="PEM file with its key")
    tls_client_ca: str | None = Field(
        None, description="PEM file; clients then need a certificate that one of these has signed (mTLS)"
    )
    api_keys: str | None = Field(
        None, description="JSON file of the API keys, a full path (docs/operating.md); none: nobody needs one"
    )
    max_running_requests: int = Field(256, ge=1, description="requests on workers at most; more wait")
    max_waiting_requests: int = Field(
        256, ge=0,
        description="requests that wait their turn at most; for one more, the last of the user with most is refused",
    )
    max_request_tokens: int | None = Field(
        None, ge=2, description="prompt and max_tokens of one request at most; none: what the context allows"
    )
    max_prefill_queue_ms: int = Field(
        2_000, ge=0,
        description="requests wait their turn at the router while every prefill worker has more than this to do",
    )
    max_attempts: int = Field(3, ge=1, le=16, description="placements of one journey at most")
    request_timeout_ms: int = Field(600_000, ge=1, description="a request ends after this, whatever its state")
    request_keep_ms: int = Field(
        60_000, ge=0, description="how long a request that ended is kept under the id that its client gave it"
    )
    max_kept_tokens: int = Field(
        500_000, ge=0, description="prompt and generated tokens, and logprobs, of those together; about 100 bytes each"
    )
    resume_grace_ms: int = Field(
        10_000, ge=0, description="how long a resumable request runs on when its client is gone"
    )
    ttft_target_ms: int | None = Field(
        None, ge=1, description="requests whose first token would come later are refused at once; none: no target"
    )
    itl_target_ms: int | None = Field(
        None, ge=1,
        description="between two tokens: no decode worker takes more sequences than keep within it; none: no target",
    )
    max_index_entries: int = Field(
        2_000_000, ge=0, description="cached blocks, each at one worker, that placement knows of; about 150 bytes each"
    )
    local_prefill_tokens: int = Field(
        64, ge=0,
        description="that a decode worker may compute itself at most, of a prompt whose beginning it has cached, where "
        "that costs less than a handoff; 0: none while there is a prefill worker",
    )
    degraded: Literal["local", "refuse"] = Field(
        "local",
        description="without a prefill worker; local: decode workers compute prompts; refuse: requests are unavailable",
    )
    worker_silence_ms: int = Field(
        6_000, ge=500,
        description="a worker that says nothing for so long is lost, after 2 s at most if its host does not answer "
        "either; a healthy one reports every 200 ms",
    )
    kept_traces: int = Field(
        256, ge=0, le=100_000,
        description="traces of ended requests that are kept for `pd-relay trace`, the slowest among them; 0: none",
    )
    trace_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s]+$",
        description="URL of an OpenTelemetry collector's OTLP/HTTP receiver for traces, such as "
        "http://127.0.0.1:4318/v1/traces; none: traces are not exported",
    )
    recovery_wait_ms: int = Field(
        30_000, ge=0, description="how long a broken request waits for a worker that may come back; 0: not at all"
    )


class TransferSettings(Section):
    """How latents get from one pool to the other."""

    transport: Literal["auto", "shared_memory", "tcp", "nixl", "nccl"] = Field(
        "auto", description="auto: what the host can do, best first, logged; nixl needs that extra, nccl the extra gpu"
    )
    lease_ms: int = Field(
        10_000, ge=100, le=3_600_000, description="how long a right to blocks lives without renewal"
    )
    fetch_timeout_ms: int = Field(5_000, ge=1, description="one fetch at most, before the peer counts as stalled")
    max_refetches: int = Field(2, ge=0, description="of a piece whose checksum or generation was wrong")
    checksums: bool = Field(True, description="off for benchmarks only")
    max_bytes_in_flight: int = Field(64 * 1024 * 1024, ge=1, description="of all fetches of one worker at most")
    prefix_fetch_ms: int = Field(
        1_000, ge=0, le=3_600_000,
        description="a prompt waits so long at most for cached blocks of another worker, then it is computed; 0: never",
    )
    max_holds: int = Field(16, ge=0, description="prefixes that one worker pins for others at once")
    max_hold_mib: int = Field(64, ge=0, description="of their blocks at most, MiB a worker")


class ClusterSettings(Section):
    """The processes of one cluster, and the Ray that runs them."""

    name: str = Field("default", pattern=CLUSTER_NAME, description="names this cluster on its host")
    ray_address: str | None = Field(None, description="none: start a Ray cluster on this host; else join this one")
    by_pool: bool = Field(
        False,
        description="with ray_address: each role runs on hosts with the Ray label pool=router, pool=prefill or "
        "pool=decode, and processes outlive `serve`; else all of them run on its host",
    )
    object_store_mib: int = Field(80, ge=75, description="Ray's object store, which no request uses")
    start_timeout_s: float = Field(
        120.0, gt=0, description="until every process must be ready, and before it until the hosts must be there"
    )
    drillable: bool = Field(False, description="whether `pd-relay drill` may break it on purpose")
    restart: bool = Field(True, description="a process that has died is started again")
    hang_timeout_s: float = Field(
        60.0, gt=0, description="a process that answers nothing for so long is ended; see router.worker_silence_ms too"
    )
    restart_delay_s: float = Field(
        1.0, ge=0, description="before the second start in a row; the first is at once, later ones wait ever longer"
    )
    max_restart_delay_s: float = Field(30.0, ge=0, description="between two starts at most")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of every process")


TIME_OF_DAY = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"


class SchedulePeriod(Section):
    """Other bounds for a part of the day, by the clock of the host where `pd-relay autoscale` runs. None: as else."""

    begin: str = Field(pattern=TIME_OF_DAY)
    end: str = Field(pattern=TIME_OF_DAY)
    prefill_least: int | None = Field(None, ge=1, le=1024)
    prefill_most: int | None = Field(None, ge=1, le=1024)
    decode_least: int | None = Field(None, ge=1, le=1024)
    decode_most: int | None = Field(None, ge=1, le=1024)


class AutoscaleSettings(Section):
    """What `pd-relay autoscale` keeps to; nothing else reads it."""

    prefill_least: int = Field(1, ge=1, le=1024, description="workers of this pool at least")
    prefill_most: int = Field(4, ge=1, le=1024, description="at most; the least stands over it")
    decode_least: int = Field(1, ge=1, le=1024, description="workers of this pool at least")
    decode_most: int = Field(4, ge=1, le=1024, description="at most; the least stands over it")
    queue_ms: float = Field(1_000.0, gt=0, description="that prompts wait at prefill workers, as measured")
    itl_ms: float = Field(100.0, gt=0, description="between two tokens, the decode workers' mean")
    cache_share: float = Field(0.8, gt=0, le=1, description="of the decode workers' blocks that is in use")
    margin: float = Field(
        0.2, ge=0.05, lt=1, description="a pool shrinks only if one worker fewer would stay so far below each target"
    )
    up_after_s: float = Field(10.0, ge=0, description="a target has been missed for so long before a pool grows")
    down_after_s: float = Field(300.0, ge=0, description="one fewer would have done for so long before it shrinks")
    pause_s: float = Field(60.0, ge=0, description="after a change, before the next one of that pool")
    interval_s: float = Field(5.0, gt=0, description="between two looks")
    schedule: tuple[SchedulePeriod, ...] = Field(
        (), strict=False,
        description="periods of the day (`begin`, `end`: HH:MM, of this host's clock) with other bounds, such as day "
        "and night; the first that fits",
    )


class Settings(Section):
    """The whole file. `model` is a path to a checkpoint, or "demo" for the one that is shipped."""

    model: str = Field("demo", description='a path, or "demo"')
    engine: EngineSettings = EngineSettings()
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    router: RouterSettings = RouterSettings()
    transfer: TransferSettings = TransferSettings()
    cluster: ClusterSettings = ClusterSettings()
    autoscale: AutoscaleSettings = AutoscaleSettings()


def load_settings(path: Path | None, overrides: dict[str, Any] | None = None) -> Settings:
    """Settings from a YAML file (or the defaults), with `overrides` ({"section.key": value}) over them.

    Raises:
        InvalidArgument: no such file, no YAML mapping, an unknown key (with a suggestion) or a value out of range.
    """
    data: dict[str, Any] = {} if path is None else read_yaml_mapping(path, "settings file")
    for dotted, value in (overrides or {}).items():
        *sections, key = dotted.split(".")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise InvalidArgument(f"settings: {section!r} must be a mapping")
        target[key] = value
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        where = f" in {path}" if path else ""
        raise InvalidArgument("; ".join(_explain(item) for item in error.errors()) + where) from None


def _explain(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    name = ".".join(location)
    if error["type"] != "extra_forbidden":
        return f"settings: {name}: {error['msg']}, got {shown(error['input'])}"
    known = list(_section_at(location[:-1]).model_fields)
    close = difflib.get_close_matches(location[-1], known, n=1)
    hint = f"did you mean {'.'.join([*location[:-1], close[0]])}?" if close else f"known here: {', '.join(known)}"
    return f"settings: unknown key {name}; {hint}"


def _section_at(path: list[str]) -> type[Section]:
    section: type[Section] = Settings
    for name in path:
        if name.isdigit():  # an entry of a list
            continue
        annotation = section.model_fields[name].annotation
        if typing.get_origin(annotation) is tuple:
            annotation = typing.get_args(annotation)[0]
        if isinstance(annotation, types.UnionType):
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        assert isinstance(annotation, type) and issubclass(annotation, Section), annotation
        section = annotation
    return section
