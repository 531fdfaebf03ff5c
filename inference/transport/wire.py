"""The gRPC service that carries sessions: its methods, its own messages, its options.

    Describe   unary: nothing up, a ``Description`` down
    Session    stream: Hello and then the edge's messages up, Welcome and then the cloud's down

gRPC brings what a socket lacks: flow control for each stream, deadlines, keep-alive pings, TLS, and
status codes. Methods carry bytes, so nothing is generated and there is no schema beside
``messages.py``. A stream that breaks ends no session: a ``Hello`` with the session's ticket goes on
with it, and each side sends again what the other has not had.
"""

import os
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pipedraft.inference.transport.session_messages import Count, Message, Seconds

PROTOCOL = 1
SERVICE = "pipedraft.EdgeCloud"
HEALTH = "grpc.health.v1.Health"
"""The service that load balancers and ``grpc_health_probe`` ask."""
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse, its field 1 being 1 or 2."""
RETRY = "retry-after-ms"
"""Trailing metadata of a refusal that is worth another try."""
NUM_PASSES = "passes"
"""Trailing metadata of a session that ended: passes over the target after the prompt's."""
FRAME_BYTES = 2**16
"""Beside a session's payload, in a message; also the most that ``Hello`` may have."""


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a stream."""

    protocol: Count = PROTOCOL
    ticket: Annotated[bytes, Meta(max_length=64)] = b""
    """Of the session to go on with; empty: ``Open`` follows."""
    next_number: Count = 0
    """Of the first reply that the edge does not have."""


class Welcome(Message, frozen=True, tag="welcome"):
    """The first answer; the session's own replies follow."""

    ticket: Annotated[bytes, Meta(max_length=64)]
    next_seq: Count
    """Of the first request that the cloud does not have."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is and how it does. A map, so that later versions may add to it."""

    protocol: int
    target: str
    """Its name, as the server was given it."""
    fingerprint: str
    """Hash of embedding, final norm and LM head."""
    anchor: str
    """Hash of the last block."""
    weights: str
    """Hash of one row of every weight: changes with any fine-tuning."""
    tokenizer: str
    """Hash of the vocabulary."""
    vocab_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    forward_s: Seconds
    """A pass over one row, as measured before serving."""
    row_s: Seconds
    """What each further row adds."""
    sessions: int
    """Held now."""
    cache_bytes: int
    """Of their keys and values."""
    is_serving: bool
    """False: it is shutting down, and takes no new sessions."""


Struct = TypeVar("Struct", bound=msgspec.Struct)


def decode(data: bytes, kind: type[Struct]) -> Struct:
    """
    Raises:
        ValueError: not one message of this kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"message: {len(data)} bytes are no {kind.__name__} ({error}); both sides must run the "
            "same version"
        ) from error


def import_grpc() -> Any:
    """``grpc.aio`` and what belongs to it, which only these two commands need.

    Raises:
        ValueError: not installed.
    """
    # Its own log lines beside ours would say the same, and at length; GRPC_VERBOSITY=info for more.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import grpc
        import grpc.aio
    except ImportError as error:
        raise ValueError(
            "grpcio: not installed, and edge and cloud talk by it; pip install 'pipedraft[edge]'"
        ) from error
    return grpc


def channel_options(message_bytes: int) -> list[tuple[str, int]]:
    """Of an edge; ``message_bytes`` bounds what the cloud may send at once."""
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
