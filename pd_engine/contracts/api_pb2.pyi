from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "tokenized", "text", "chat", "sampling_params", "stream", "placement", "cache_salt", "parse_special_tokens", "add_bos", "priority", "resumable", "resume_from", "resume_output_ids", "user", "ttft_target_ms", "itl_target_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    RESUME_OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokenized: TokenizedInput
    text: str
    chat: ChatInput
    sampling_params: SamplingParams
    stream: bool
    placement: Placement
    cache_salt: str
    parse_special_tokens: bool
    add_bos: bool
    priority: int
    resumable: bool
    resume_from: _containers.RepeatedScalarFieldContainer[int]
    resume_output_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    user: str
    ttft_target_ms: int
    itl_target_ms: int
    def __init__(self, request_id: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., stream: _Optional[bool] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., cache_salt: _Optional[str] = ..., parse_special_tokens: _Optional[bool] = ..., add_bos: _Optional[bool] = ..., priority: _Optional[int] = ..., resumable: _Optional[bool] = ..., resume_from: _Optional[_Iterable[int]] = ..., resume_output_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., user: _Optional[str] = ..., ttft_target_ms: _Optional[int] = ..., itl_target_ms: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenizedInput(_message.Message):
    __slots__ = ("original_text", "input_ids")
    ORIGINAL_TEXT_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    original_text: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, original_text: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "logprobs", "speculate", "n", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
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
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    speculate: int
    n: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., speculate: _Optional[int] = ..., n: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "bypass_prefix_cache", "report_block_checksums", "report_placement")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    REPORT_BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    REPORT_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    bypass_prefix_cache: bool
    report_block_checksums: bool
    report_placement: bool
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., bypass_prefix_cache: _Optional[bool] = ..., report_block_checksums: _Optional[bool] = ..., report_placement: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "chunk", "complete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk: GenerateStreamChunk
    complete: GenerateComplete
    def __init__(self, request_id: _Optional[str] = ..., chunk: _Optional[_Union[GenerateStreamChunk, _Mapping]] = ..., complete: _Optional[_Union[GenerateComplete, _Mapping]] = ...) -> None: ...

class GenerateStreamChunk(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "choice")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    choice: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., choice: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
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

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class GenerateComplete(_message.Message):
    __slots__ = ("output_ids", "text", "finish_reason", "usage", "seed", "logprobs", "accepted_tokens", "drafted_tokens", "handoff", "warnings", "stop_reason", "placement", "choice", "local_prefill")
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: str
    usage: Usage
    seed: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    accepted_tokens: int
    drafted_tokens: int
    handoff: Handoff
    warnings: _containers.RepeatedScalarFieldContainer[str]
    stop_reason: str
    placement: PlacementReport
    choice: int
    local_prefill: LocalPrefill
    def __init__(self, output_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., accepted_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., stop_reason: _Optional[str] = ..., placement: _Optional[_Union[PlacementReport, _Mapping]] = ..., choice: _Optional[int] = ..., local_prefill: _Optional[_Union[LocalPrefill, _Mapping]] = ...) -> None: ...

class PlacementReport(_message.Message):
    __slots__ = ("kind", "prefill_worker", "decode_worker", "ttft_ms", "refusal", "num_prompt_tokens", "num_hashed_blocks", "candidates", "break_even_tokens", "prefix_worker", "num_prefix_blocks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HASHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    BREAK_EVEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    prefill_worker: str
    decode_worker: str
    ttft_ms: float
    refusal: str
    num_prompt_tokens: int
    num_hashed_blocks: int
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementCandidate]
    break_even_tokens: float
    prefix_worker: str
    num_prefix_blocks: int
    def __init__(self, kind: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., refusal: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_hashed_blocks: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ..., break_even_tokens: _Optional[float] = ..., prefix_worker: _Optional[str] = ..., num_prefix_blocks: _Optional[int] = ...) -> None: ...

class PlacementCandidate(_message.Message):
    __slots__ = ("part", "worker_id", "chosen", "num_held_blocks", "terms", "exclusion")
    PART_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    EXCLUSION_FIELD_NUMBER: _ClassVar[int]
    part: str
    worker_id: str
    chosen: bool
    num_held_blocks: int
    terms: _containers.RepeatedCompositeFieldContainer[CostTerm]
    exclusion: str
    def __init__(self, part: _Optional[str] = ..., worker_id: _Optional[str] = ..., chosen: _Optional[bool] = ..., num_held_blocks: _Optional[int] = ..., terms: _Optional[_Iterable[_Union[CostTerm, _Mapping]]] = ..., exclusion: _Optional[str] = ...) -> None: ...

class CostTerm(_message.Message):
    __slots__ = ("name", "ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ms: float
    def __init__(self, name: _Optional[str] = ..., ms: _Optional[float] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "bytes", "transport", "block_checksums", "hidden_bytes")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    bytes: int
    transport: str
    block_checksums: _containers.RepeatedScalarFieldContainer[int]
    hidden_bytes: int
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., bytes: _Optional[int] = ..., transport: _Optional[str] = ..., block_checksums: _Optional[_Iterable[int]] = ..., hidden_bytes: _Optional[int] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("worker", "block_checksums")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    block_checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[str] = ..., block_checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("unknown_request_ids",)
    UNKNOWN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    unknown_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model_path", "served_model_name", "architecture", "max_context_length", "vocab_size", "dtype", "num_parameters", "fingerprint", "block_size", "bytes_per_token", "num_draft_layers", "eos_token_ids")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    served_model_name: str
    architecture: str
    max_context_length: int
    vocab_size: int
    dtype: str
    num_parameters: int
    fingerprint: str
    block_size: int
    bytes_per_token: int
    num_draft_layers: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_path: _Optional[str] = ..., served_model_name: _Optional[str] = ..., architecture: _Optional[str] = ..., max_context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., num_parameters: _Optional[int] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., num_draft_layers: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "server_type", "uptime_seconds", "active_requests", "workers", "router_rss_bytes", "router_pid", "cluster", "settings_json")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_TYPE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTER_PID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    version: str
    server_type: str
    uptime_seconds: float
    active_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    router_rss_bytes: int
    router_pid: int
    cluster: str
    settings_json: str
    def __init__(self, version: _Optional[str] = ..., server_type: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., active_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., router_rss_bytes: _Optional[int] = ..., router_pid: _Optional[int] = ..., cluster: _Optional[str] = ..., settings_json: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("id", "role", "pid", "host", "address", "epoch", "state", "num_blocks_total", "num_blocks_free", "num_running", "num_waiting", "rss_bytes", "weights_bytes", "arena_bytes", "ops_backend", "load_seconds", "num_preempted", "host_cache_bytes", "num_moves_total", "num_recomputed_total", "memory", "state_ms", "load_cpu_seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPS_BACKEND_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: str
    pid: int
    host: str
    address: str
    epoch: str
    state: str
    num_blocks_total: int
    num_blocks_free: int
    num_running: int
    num_waiting: int
    rss_bytes: int
    weights_bytes: int
    arena_bytes: int
    ops_backend: str
    load_seconds: float
    num_preempted: int
    host_cache_bytes: int
    num_moves_total: int
    num_recomputed_total: int
    memory: MemoryAudit
    state_ms: int
    load_cpu_seconds: float
    def __init__(self, id: _Optional[str] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[str] = ..., state: _Optional[str] = ..., num_blocks_total: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., ops_backend: _Optional[str] = ..., load_seconds: _Optional[float] = ..., num_preempted: _Optional[int] = ..., host_cache_bytes: _Optional[int] = ..., num_moves_total: _Optional[int] = ..., num_recomputed_total: _Optional[int] = ..., memory: _Optional[_Union[MemoryAudit, _Mapping]] = ..., state_ms: _Optional[int] = ..., load_cpu_seconds: _Optional[float] = ...) -> None: ...

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

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("loads", "num_requests_waiting", "router_stages", "num_drafted_total", "num_accepted_total", "num_handoffs_total", "handoff_bytes_total", "experts")
    LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    ROUTER_STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFFS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    num_requests_waiting: int
    router_stages: _containers.RepeatedCompositeFieldContainer[StageSeconds]
    num_drafted_total: int
    num_accepted_total: int
    num_handoffs_total: int
    handoff_bytes_total: int
    experts: _containers.RepeatedCompositeFieldContainer[ExpertSkew]
    def __init__(self, loads: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., num_requests_waiting: _Optional[int] = ..., router_stages: _Optional[_Iterable[_Union[StageSeconds, _Mapping]]] = ..., num_drafted_total: _Optional[int] = ..., num_accepted_total: _Optional[int] = ..., num_handoffs_total: _Optional[int] = ..., handoff_bytes_total: _Optional[int] = ..., experts: _Optional[_Iterable[_Union[ExpertSkew, _Mapping]]] = ...) -> None: ...

class ExpertSkew(_message.Message):
    __slots__ = ("role", "max_over_mean")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MAX_OVER_MEAN_FIELD_NUMBER: _ClassVar[int]
    role: str
    max_over_mean: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, role: _Optional[str] = ..., max_over_mean: _Optional[_Iterable[float]] = ...) -> None: ...

class StageSeconds(_message.Message):
    __slots__ = ("stage", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    seconds: float
    def __init__(self, stage: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "num_running", "num_waiting", "num_blocks_free", "num_blocks_total", "queued_prefill_tokens", "num_leases", "num_pins", "role", "prefill_tokens_per_s", "itl_ms", "stages", "watched_seconds", "fetched_bytes_total", "num_quarantined_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    WATCHED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_total: int
    queued_prefill_tokens: int
    num_leases: int
    num_pins: int
    role: str
    prefill_tokens_per_s: float
    itl_ms: float
    stages: _containers.RepeatedCompositeFieldContainer[StageSeconds]
    watched_seconds: float
    fetched_bytes_total: int
    num_quarantined_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_total: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_pins: _Optional[int] = ..., role: _Optional[str] = ..., prefill_tokens_per_s: _Optional[float] = ..., itl_ms: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageSeconds, _Mapping]]] = ..., watched_seconds: _Optional[float] = ..., fetched_bytes_total: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ...) -> None: ...

class GetTracesRequest(_message.Message):
    __slots__ = ("request_id", "num_slowest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOWEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_slowest: int
    def __init__(self, request_id: _Optional[str] = ..., num_slowest: _Optional[int] = ...) -> None: ...

class GetTracesResponse(_message.Message):
    __slots__ = ("traces",)
    TRACES_FIELD_NUMBER: _ClassVar[int]
    traces: _containers.RepeatedCompositeFieldContainer[Trace]
    def __init__(self, traces: _Optional[_Iterable[_Union[Trace, _Mapping]]] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("request_id", "choice", "trace_id", "began_at", "end", "error", "num_prompt_tokens", "num_cached_tokens", "num_tokens", "ttft_ms", "total_ms", "spans")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    trace_id: str
    began_at: float
    end: str
    error: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    ttft_ms: float
    total_ms: float
    spans: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., trace_id: _Optional[str] = ..., began_at: _Optional[float] = ..., end: _Optional[str] = ..., error: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ...) -> None: ...

class TraceSpan(_message.Message):
    __slots__ = ("name", "depth", "begun_ms", "ended_ms", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    BEGUN_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    depth: int
    begun_ms: float
    ended_ms: float
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., depth: _Optional[int] = ..., begun_ms: _Optional[float] = ..., ended_ms: _Optional[float] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...
