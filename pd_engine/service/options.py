"""Channel and server options, the same on both ends.

Without keepalive a call over a cut link hangs for more than a minute; with 1 s / 1 s it fails after about 2 s. A
server gives a busy peer longer. One that does not permit such pings answers them with "too many pings", hence two of
its options. gRPC itself would wait two minutes for a stranger's first word, and for ever for its first call.
"""

from __future__ import annotations

KEEPALIVE_TIME_MS = 1_000
KEEPALIVE_TIMEOUT_MS = 1_000
SERVER_KEEPALIVE_TIMEOUT_MS = 6_000
FIRST_WORDS_MS = 5_000  # until a connection speaks HTTP/2, and again until it has confirmed the server's settings
MAX_CONNECTIONS = 1_024  # of a worker: routers and other workers have one each
WITHOUT_CALL_MS = 60_000  # then a connection is closed; a channel makes another one with its next call
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_METADATA_BYTES = 16 * 1024
MAX_RECONNECT_BACKOFF_MS = 1_000
CONNECT_TIMEOUT_MS = 2_000  # a busy peer takes its time to answer; who is not there refuses at once

Options = list[tuple[str, str | int]]

_BOTH: Options = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
]

SERVER_OPTIONS: Options = [
    *_BOTH,
    ("grpc.keepalive_timeout_ms", SERVER_KEEPALIVE_TIMEOUT_MS),
    ("grpc.server_handshake_timeout_ms", FIRST_WORDS_MS),
    ("grpc.http2.settings_timeout", FIRST_WORDS_MS),
    ("grpc.max_connection_idle_ms", WITHOUT_CALL_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two workers on one port is an error, not a lottery
]

CHANNEL_OPTIONS: Options = [
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # of one attempt, despite its name
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
