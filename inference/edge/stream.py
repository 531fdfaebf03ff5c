"""Client side of sessions on a gRPC server. Each session has its own stream.

A broken stream is not resumed. It raises ``SessionLost``, and the caller opens a new session with
the output so far.
"""

import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from ...errors import Failure
from . import session_messages as messages
from . import wire
from .channel import Traffic
from .session_messages import REPLIES, REQUESTS

NUMBER = re.compile(r"[0-9]{1,9}")
# An IPv6 address needs brackets: its colons would hide the one before the port.
HOST = re.compile(r"[\w.-]+|\[[\w.:%]+\]")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
"""First and longest wait between attempts to reach a server; the wait doubles each time."""
CLOSING_S = 2.0
"""Seconds to wait for the server's last message after the output is complete."""
RECOVERABLE = frozenset(
    ["UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "OK"]
)
"""Status codes for a broken stream, an expired session, and a server that is down or full."""


class SessionLost(Exception):
    """The session ended before its output was complete, or the server is unreachable."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Server address and access settings."""

    server: str
    """host:port"""
    uses_tls: bool = False
    root_certificates: bytes | None = None
    """PEM certificates of authorities for the server's certificate; None: the system's."""
    token: str = ""
    connect_s: float = 10.0
    """Seconds per connection attempt."""
    answer_s: float = 30.0
    """Seconds without a due answer before the session counts as lost."""
    give_up_s: float = 60.0
    """Seconds without a reply before the output ends in a ``Failure``."""

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if not HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--server: {self.server!r}; give host:port, as 127.0.0.1:50051")

    def lost(self, end: "Break") -> SessionLost:
        """Return the exception for an ended call, or raise ValueError for a permanent refusal."""
        if end.code in RECOVERABLE:
            return SessionLost(end.text)
        raise ValueError(f"server: {self.server}: {end.text} ({end.code.lower()})")


@dataclass(frozen=True)
class Break:
    """End of a gRPC call, with the status code and text."""

    code: str
    text: str
    num_passes: int | None = None

    @classmethod
    def of(cls, call: wire.Untyped) -> "Break":
        """Read the end from ``call``, which is the finished call or the error that it raised."""
        # From another machine: trust no format.
        passes = str(dict(call.trailing_metadata() or ()).get(wire.NUM_PASSES))
        num_passes = int(passes) if NUMBER.fullmatch(passes) else None
        return cls(call.code().name, " ".join(str(call.details()).split()), num_passes)


class Patience:
    """Retry limit, which is reached after ``give_up_s`` seconds without a reply."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.progressed()

    def progressed(self) -> None:
        self._since_s, self._wait_s = time.monotonic(), FIRST_WAIT_S

    def wait(self, lost: SessionLost) -> None:
        """Wait before the next attempt, or raise ``Failure`` if the limit is reached."""
        access = self.access
        left_s = self._since_s + access.give_up_s - time.monotonic()
        if left_s < 0:
            raise Failure(
                f"server: {access.server} could not be used for {access.give_up_s:g} s ({lost})"
            )
        # Jitter: clients of a server that went down must not all return at once.
        wait_s = min(self._wait_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
        time.sleep(min(wait_s, left_s))
        self._wait_s = 2 * self._wait_s


class Connection:
    """Channel to a server. Use it in a ``with`` statement."""

    def __init__(self, access: Access) -> None:
        self.grpc, self.access = wire.import_grpc(), access
        # Payload bytes, without the headers of gRPC (5 bytes), HTTP/2 (9) and lower layers.
        self.up, self.down = Traffic(), Traffic()
        self.patience = Patience(access)
        bearer = ("authorization", f"Bearer {access.token}")
        self._metadata = (bearer,) if access.token else ()

    def __enter__(self) -> "Connection":
        access, options = self.access, wire.channel_options(messages.MAX_BYTES)
        if access.uses_tls:
            credentials = self.grpc.ssl_channel_credentials(access.root_certificates)
            self._channel = self.grpc.secure_channel(access.server, credentials, options)
        else:
            self._channel = self.grpc.insecure_channel(access.server, options)
        self._describe = self._channel.unary_unary(f"/{wire.SERVICE}/Describe")
        self._session = self._channel.stream_stream(f"/{wire.SERVICE}/Session")
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def call(self, requests: Iterator[bytes]) -> wire.Untyped:
        """Start a session's stream and return its gRPC call, which iterates over the replies."""
        return self._session(requests, metadata=self._metadata)

    def describe(self) -> tuple[messages.Description, float]:
        """Wait until the server answers. Return its description and the round trip in seconds."""
        options = {"metadata": self._metadata, "timeout": self.access.connect_s}
        while True:
            try:
                self._describe(b"", **options)
                # Only the second call measures: the first one also connects.
                started_s = time.monotonic()
                data = self._describe(b"", **options)
                return read_description(data), time.monotonic() - started_s
            except self.grpc.RpcError as error:
                self.patience.wait(self.access.lost(Break.of(error)))


def read_description(data: bytes) -> messages.Description:
    """Decode a server's description, or raise ValueError if its protocol version is another one."""
    try:
        about = msgspec.msgpack.decode(data, type=messages.Description)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"server: it does not describe itself ({error}); install the same version on both sides"
        ) from error
    if about.protocol != messages.PROTOCOL:
        raise ValueError(
            f"server: it speaks protocol {about.protocol}, this side {messages.PROTOCOL}; install "
            "the same version on both sides"
        )
    return about


class SessionStream:
    """Stream of one session.

    A thread receives the replies, even while the draft computes. It queues each reply, and finally
    the stream's end, for ``take``.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._next_number = connection, 0
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._arrived: SimpleQueue[tuple[bytes | Break, float]] = SimpleQueue()
        # gRPC's own thread waits in this iterator; None ends it.
        self._call = connection.call(iter(self._requests.get, None))
        # A daemon: a stream that never ends must not keep the process alive.
        threading.Thread(target=self._read, name="replies", daemon=True).start()

    def _read(self) -> None:
        try:
            for data in self._call:
                self._arrived.put((data, time.monotonic()))
            end = Break.of(self._call)
        except self._connection.grpc.RpcError as error:
            end = Break.of(error)
        self._arrived.put((end, time.monotonic()))

    def send(self, request: messages.Request) -> None:
        data = REQUESTS.to_bytes(request)
        self._connection.up.messages += 1
        self._connection.up.payload_bytes += len(data)
        self._requests.put(data)

    def _get(self, timeout_s: float) -> tuple[bytes | Break, float] | None:
        """Return the next reply or the stream's end with its arrival time, or None on a timeout."""
        try:
            return self._arrived.get(timeout_s > 0, max(timeout_s, 0))
        except Empty:
            return None

    def take(self, *, waits: bool) -> tuple[messages.Reply, float] | None:
        """Return the next reply and its arrival time.

        If ``waits`` is false and nothing has arrived, return None.

        Raises:
            SessionLost: the stream broke, or the answer did not come.
            ValueError: the server refuses permanently, or sent no valid reply.
        """
        connection = self._connection
        found = self._get(connection.access.answer_s if waits else 0.0)
        if found is None:
            if waits:
                raise SessionLost("it does not answer")
            return None
        data, arrived_s = found
        if isinstance(data, Break):
            raise connection.access.lost(data)
        connection.down.messages += 1
        connection.down.payload_bytes += len(data)
        reply = REPLIES.decode(data)
        # gRPC keeps the order, so a gap is the server's fault.
        if reply.number != self._next_number:
            raise ValueError(f"server: reply {reply.number} where {self._next_number} is due")
        self._next_number += 1
        # Any valid reply shows that the server works: the time limit starts again.
        connection.patience.progressed()
        return reply, arrived_s

    def close(self, closing: messages.Close) -> int | None:
        """End the session. Return its target passes after the prompt, or None if unknown."""
        self.send(closing)
        until_s, num_passes = time.monotonic() + CLOSING_S, None
        # Replies still in flight are useless now: only the end counts.
        while (found := self._get(until_s - time.monotonic())) is not None:
            if isinstance(found[0], Break):
                num_passes = found[0].num_passes
                break
        self.hang_up()
        return num_passes

    def hang_up(self) -> None:
        """Cancel the stream without a ``Close``. This has no effect after the stream's end."""
        self._call.cancel()
        self._requests.put(None)
