"""Methods and options of the gRPC service for sessions.

    Describe   unary: nothing up, a ``Description`` down
    Session    stream: the edge's messages up, Open first; the cloud's replies down

gRPC adds flow control per stream, deadlines, keep-alive pings, TLS and status codes. Methods carry
bytes, so no code is generated and ``session_messages.py`` is the only schema.
"""

import os
from types import ModuleType
from typing import Any, TypeAlias

Untyped: TypeAlias = Any
"""Object from grpc, a package without type annotations."""
SERVICE = "pipedraft.EdgeCloud"
NUM_PASSES = "passes"
"""Trailing metadata key for a finished session's target passes after the prompt."""
FRAME_BYTES = 2**16
"""Bytes allowed in a message beyond a session's payload."""


def import_grpc() -> ModuleType:
    """Import ``grpc.aio``, which only servers and edge clients need."""
    # gRPC's log lines would repeat ours at length; set GRPC_VERBOSITY=info for more.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc.aio

    return grpc


def channel_options(message_bytes: int) -> list[tuple[str, int]]:
    """Return channel options for an edge. ``message_bytes`` limits a message's payload."""
    return [
        *_shared_options(message_bytes),
        # Between outputs nobody waits for a sign of life.
        ("grpc.keepalive_permit_without_calls", 0),
        # gRPC's own backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Use a separate connection, whatever else the process talks to.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(message_bytes: int, max_streams: int) -> list[tuple[str, int]]:
    return [
        *_shared_options(message_bytes),
        ("grpc.max_concurrent_streams", max_streams),
        # A second server on a port in use must fail, not share its clients.
        ("grpc.so_reuseport", 0),
        # An edge waiting for a slow forward pass pings without sending data.
        ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ]


def _shared_options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes + FRAME_BYTES),
        # Bounds a stranger's headers, which arrive before the token is checked.
        ("grpc.max_metadata_size", 8_192),
        # Otherwise gRPC pings after messages, to measure the link. On a link that loses packets, a
        # message then waits for the ping before it.
        ("grpc.http2.bdp_probe", 0),
        # Without these pings, gRPC's window stays at 64 KiB, and a longer message waits.
        ("grpc.http2.lookahead_bytes", 2**20),
        # An unplugged peer sends no FIN: an unanswered ping reveals it.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
