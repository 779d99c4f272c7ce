from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JourneyRef(_message.Message):
    __slots__ = ("journey_id", "attempt")
    JOURNEY_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    journey_id: str
    attempt: int
    def __init__(self, journey_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "role", "epoch", "fingerprint", "layout_version", "block_size", "num_blocks_total", "bytes_per_token", "dtype", "max_speculate", "max_context_length", "pid", "host", "weights_bytes", "arena_bytes", "ops_backend", "load_seconds", "transports", "num_parameters", "computes_prompts", "load_cpu_seconds", "lifeline_port")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPS_BACKEND_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIFELINE_PORT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    epoch: str
    fingerprint: str
    layout_version: int
    block_size: int
    num_blocks_total: int
    bytes_per_token: int
    dtype: str
    max_speculate: int
    max_context_length: int
    pid: int
    host: str
    weights_bytes: int
    arena_bytes: int
    ops_backend: str
    load_seconds: float
    transports: _containers.RepeatedScalarFieldContainer[str]
    num_parameters: int
    computes_prompts: bool
    load_cpu_seconds: float
    lifeline_port: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layout_version: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks_total: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., dtype: _Optional[str] = ..., max_speculate: _Optional[int] = ..., max_context_length: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., weights_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., ops_backend: _Optional[str] = ..., load_seconds: _Optional[float] = ..., transports: _Optional[_Iterable[str]] = ..., num_parameters: _Optional[int] = ..., computes_prompts: _Optional[bool] = ..., load_cpu_seconds: _Optional[float] = ..., lifeline_port: _Optional[int] = ...) -> None: ...

class LoadsRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class LoadsReply(_message.Message):
    __slots__ = ("epoch", "state", "num_running", "num_waiting", "num_blocks_free", "num_blocks_total", "queued_prefill_tokens", "num_leases", "num_pins", "rss_bytes", "prefill_tokens_per_s", "itl_ms", "num_streams", "num_quarantined_blocks", "pull_bytes_per_s", "num_preempted", "host_cache_bytes", "num_moves_total", "num_recomputed_total", "fetched_bytes_total", "num_fetches_total", "fetch_us_total", "num_failed_pulls_total", "num_expired_leases_total", "stages", "num_watched_steps", "watched_seconds", "experts", "memory")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FETCH_US_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_PULLS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_LEASES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_WATCHED_STEPS_FIELD_NUMBER: _ClassVar[int]
    WATCHED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    state: str
    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_total: int
    queued_prefill_tokens: int
    num_leases: int
    num_pins: int
    rss_bytes: int
    prefill_tokens_per_s: float
    itl_ms: float
    num_streams: int
    num_quarantined_blocks: int
    pull_bytes_per_s: float
    num_preempted: int
    host_cache_bytes: int
    num_moves_total: int
    num_recomputed_total: int
    fetched_bytes_total: int
    num_fetches_total: int
    fetch_us_total: int
    num_failed_pulls_total: int
    num_expired_leases_total: int
    stages: _containers.RepeatedCompositeFieldContainer[StageTime]
    num_watched_steps: int
    watched_seconds: float
    experts: _containers.RepeatedCompositeFieldContainer[ExpertTokens]
    memory: MemoryAudit
    def __init__(self, epoch: _Optional[str] = ..., state: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_total: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_pins: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., itl_ms: _Optional[float] = ..., num_streams: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., pull_bytes_per_s: _Optional[float] = ..., num_preempted: _Optional[int] = ..., host_cache_bytes: _Optional[int] = ..., num_moves_total: _Optional[int] = ..., num_recomputed_total: _Optional[int] = ..., fetched_bytes_total: _Optional[int] = ..., num_fetches_total: _Optional[int] = ..., fetch_us_total: _Optional[int] = ..., num_failed_pulls_total: _Optional[int] = ..., num_expired_leases_total: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., num_watched_steps: _Optional[int] = ..., watched_seconds: _Optional[float] = ..., experts: _Optional[_Iterable[_Union[ExpertTokens, _Mapping]]] = ..., memory: _Optional[_Union[MemoryAudit, _Mapping]] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("stage", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    seconds: float
    def __init__(self, stage: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class MemoryAudit(_message.Message):
    __slots__ = ("resident_bytes", "peak_resident_bytes", "weights_bytes", "arena_bytes", "arena_resident_bytes", "host_cache_bytes", "code_bytes", "other_bytes", "allocator_reserved_bytes", "allocator_used_bytes", "available_bytes")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    peak_resident_bytes: int
    weights_bytes: int
    arena_bytes: int
    arena_resident_bytes: int
    host_cache_bytes: int
    code_bytes: int
    other_bytes: int
    allocator_reserved_bytes: int
    allocator_used_bytes: int
    available_bytes: int
    def __init__(self, resident_bytes: _Optional[int] = ..., peak_resident_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., arena_resident_bytes: _Optional[int] = ..., host_cache_bytes: _Optional[int] = ..., code_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., allocator_reserved_bytes: _Optional[int] = ..., allocator_used_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ...) -> None: ...

class ExpertTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TokensRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class TokensBatch(_message.Message):
    __slots__ = ("epoch", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    events: _containers.RepeatedCompositeFieldContainer[TokensEvent]
    def __init__(self, epoch: _Optional[str] = ..., events: _Optional[_Iterable[_Union[TokensEvent, _Mapping]]] = ...) -> None: ...

class TokensEvent(_message.Message):
    __slots__ = ("journey", "index", "token_ids", "logprobs", "finish_reason", "stop_reason", "accepted_tokens", "drafted_tokens", "failure", "handoff", "local_prefill")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    finish_reason: str
    stop_reason: str
    accepted_tokens: int
    drafted_tokens: int
    failure: Failure
    handoff: HandoffDone
    local_prefill: LocalPrefillDone
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., accepted_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., handoff: _Optional[_Union[HandoffDone, _Mapping]] = ..., local_prefill: _Optional[_Union[LocalPrefillDone, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "retryable", "missing_blocks")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    missing_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., missing_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptTimes(_message.Message):
    __slots__ = ("total_ms", "queue_ms", "fetch_ms", "chunks")
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    total_ms: float
    queue_ms: float
    fetch_ms: float
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkTime]
    def __init__(self, total_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., fetch_ms: _Optional[float] = ..., chunks: _Optional[_Iterable[_Union[ChunkTime, _Mapping]]] = ...) -> None: ...

class ChunkTime(_message.Message):
    __slots__ = ("begun_ms", "ms", "num_tokens")
    BEGUN_MS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    begun_ms: float
    ms: float
    num_tokens: int
    def __init__(self, begun_ms: _Optional[float] = ..., ms: _Optional[float] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class HandoffDone(_message.Message):
    __slots__ = ("bytes", "transport", "block_checksums", "hidden_bytes", "cached_tokens", "pull_ms", "exposed_ms")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULL_MS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    transport: str
    block_checksums: _containers.RepeatedScalarFieldContainer[int]
    hidden_bytes: int
    cached_tokens: int
    pull_ms: float
    exposed_ms: float
    def __init__(self, bytes: _Optional[int] = ..., transport: _Optional[str] = ..., block_checksums: _Optional[_Iterable[int]] = ..., hidden_bytes: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., pull_ms: _Optional[float] = ..., exposed_ms: _Optional[float] = ...) -> None: ...

class LocalPrefillDone(_message.Message):
    __slots__ = ("cached_tokens", "block_checksums", "times")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    block_checksums: _containers.RepeatedScalarFieldContainer[int]
    times: PromptTimes
    def __init__(self, cached_tokens: _Optional[int] = ..., block_checksums: _Optional[_Iterable[int]] = ..., times: _Optional[_Union[PromptTimes, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "logprobs", "speculate", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    speculate: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., speculate: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("journey", "router_id", "block_hashes", "num_prompt_tokens", "token_ids", "num_emitted_tokens", "sampling", "deadline_ms", "bypass_prefix_cache", "report_block_checksums", "cache_salt", "priority")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    REPORT_BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    router_id: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_prompt_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_emitted_tokens: int
    sampling: Sampling
    deadline_ms: int
    bypass_prefix_cache: bool
    report_block_checksums: bool
    cache_salt: str
    priority: int
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., router_id: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., num_prompt_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_emitted_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., bypass_prefix_cache: _Optional[bool] = ..., report_block_checksums: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("epoch", "lease_id", "lease_ms", "num_held_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    lease_id: str
    lease_ms: int
    num_held_blocks: int
    def __init__(self, epoch: _Optional[str] = ..., lease_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., num_held_blocks: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("journey", "router_id", "token_ids", "num_prompt_tokens", "sampling", "lease_id", "lease_ms", "num_held_blocks", "deadline_ms", "bypass_prefix_cache", "no_handoff", "cache_salt", "priority", "prefix_holder")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    NO_HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOLDER_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    router_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: Sampling
    lease_id: str
    lease_ms: int
    num_held_blocks: int
    deadline_ms: int
    bypass_prefix_cache: bool
    no_handoff: bool
    cache_salt: str
    priority: int
    prefix_holder: PrefixHolder
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., router_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., lease_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., bypass_prefix_cache: _Optional[bool] = ..., no_handoff: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., prefix_holder: _Optional[_Union[PrefixHolder, _Mapping]] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("address", "epoch", "num_blocks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    address: str
    epoch: str
    num_blocks: int
    def __init__(self, address: _Optional[str] = ..., epoch: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("source", "first_token")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    source: SourceInfo
    first_token: FirstToken
    def __init__(self, source: _Optional[_Union[SourceInfo, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ...) -> None: ...

class SourceInfo(_message.Message):
    __slots__ = ("epoch", "address", "token")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    address: str
    token: str
    def __init__(self, epoch: _Optional[str] = ..., address: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("index", "token_id", "logprobs", "finish_reason", "stop_reason", "cached_tokens", "times")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_id: int
    logprobs: Logprobs
    finish_reason: str
    stop_reason: str
    cached_tokens: int
    times: PromptTimes
    def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., times: _Optional[_Union[PromptTimes, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("journey", "lease_id", "source")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    lease_id: str
    source: SourceInfo
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., lease_id: _Optional[str] = ..., source: _Optional[_Union[SourceInfo, _Mapping]] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class ComputePromptRequest(_message.Message):
    __slots__ = ("journey", "lease_id", "prefix_holder")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOLDER_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    lease_id: str
    prefix_holder: PrefixHolder
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., lease_id: _Optional[str] = ..., prefix_holder: _Optional[_Union[PrefixHolder, _Mapping]] = ...) -> None: ...

class ComputePromptReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("router_id", "journeys")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    JOURNEYS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    journeys: _containers.RepeatedCompositeFieldContainer[JourneyRef]
    def __init__(self, router_id: _Optional[str] = ..., journeys: _Optional[_Iterable[_Union[JourneyRef, _Mapping]]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("epoch", "states")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    states: _containers.RepeatedCompositeFieldContainer[JourneyState]
    def __init__(self, epoch: _Optional[str] = ..., states: _Optional[_Iterable[_Union[JourneyState, _Mapping]]] = ...) -> None: ...

class JourneyState(_message.Message):
    __slots__ = ("journey", "state")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    state: str
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., state: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("journeys", "reason")
    JOURNEYS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    journeys: _containers.RepeatedCompositeFieldContainer[JourneyRef]
    reason: str
    def __init__(self, journeys: _Optional[_Iterable[_Union[JourneyRef, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class CacheEventsRequest(_message.Message):
    __slots__ = ("from_sequence",)
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    from_sequence: int
    def __init__(self, from_sequence: _Optional[int] = ...) -> None: ...

class CacheEventBatch(_message.Message):
    __slots__ = ("epoch", "sequence", "snapshot", "stored", "removed", "previous_sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    snapshot: bool
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    previous_sequence: int
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., previous_sequence: _Optional[int] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("journey", "token", "source_epoch", "destination_epoch", "hello")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    token: str
    source_epoch: str
    destination_epoch: str
    hello: bytes
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., token: _Optional[str] = ..., source_epoch: _Optional[str] = ..., destination_epoch: _Optional[str] = ..., hello: _Optional[bytes] = ...) -> None: ...

class ManifestPart(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: bytes
    def __init__(self, part: _Optional[bytes] = ...) -> None: ...

class SourceRenewRequest(_message.Message):
    __slots__ = ("journey", "token", "lease_ms")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    token: str
    lease_ms: int
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., token: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class SourceRenewReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("journey", "token")
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    journey: JourneyRef
    token: str
    def __init__(self, journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("block_hashes", "lease_ms", "cache_salt", "journey", "token_ids", "num_held_blocks")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    lease_ms: int
    cache_salt: str
    journey: JourneyRef
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_held_blocks: int
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., lease_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., journey: _Optional[_Union[JourneyRef, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_held_blocks: _Optional[int] = ...) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("token", "epoch", "num_blocks")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    token: str
    epoch: str
    num_blocks: int
    def __init__(self, token: _Optional[str] = ..., epoch: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...
