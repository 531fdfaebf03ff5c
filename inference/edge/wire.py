"""The gRPC service that carries sessions: its methods and options.

    Describe   unary: nothing up, a ``Description`` down
    Session    stream: the edge's messages up, Open first; the cloud's replies down

gRPC brings what a socket lacks: flow control for each stream, deadlines, keep-alive pings, TLS, and
status codes. Methods carry bytes, so nothing is generated and there is no schema beside
``session_messages.py``.
"""

import os
from types import ModuleType
from typing import Any, TypeAlias

Untyped: TypeAlias = Any
"""An object of grpc, which has no types."""
SERVICE = "pipedraft.EdgeCloud"
NUM_PASSES = "passes"
"""Trailing metadata of a session that ended: passes over the target after the prompt's."""
FRAME_BYTES = 2**16
"""Room in a message beside a session's payload."""


def import_grpc() -> ModuleType:
    """``grpc.aio`` and what belongs to it, which only these two commands need.

    Raises:
        ValueError: not installed.
    """
    # Its own log lines beside ours would say the same, and at length; GRPC_VERBOSITY=info for more.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import grpc.aio
    except ImportError as error:
        raise ValueError(
            "grpcio: not installed, and edge and cloud talk by it; pip install 'pipedraft[edge]'"
        ) from error
    return grpc


def channel_options(message_bytes: int) -> list[tuple[str, int]]:
    """Options of an edge; ``message_bytes`` bounds what the cloud may send at once."""
    return [
        *_shared_options(message_bytes),
        ("grpc.keepalive_permit_without_calls", 0),
        # gRPC's own wait between attempts grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A connection of its own, whatever else the process talks to.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(message_bytes: int, max_streams: int) -> list[tuple[str, int]]:
    return [
        *_shared_options(message_bytes),
        ("grpc.max_concurrent_streams", max_streams),
        # A second server on a port in use must fail, not share its clients.
        ("grpc.so_reuseport", 0),
        # An edge that waits for a slow forward pass pings without sending anything.
        ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ]


def _shared_options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes + FRAME_BYTES),
        ("grpc.max_metadata_size", 8_192),
        # A peer that was unplugged sends no FIN: a ping that stays without answer finds it.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
