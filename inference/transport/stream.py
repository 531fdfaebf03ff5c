"""The draft's end of a session: a stream that is made again when it breaks, and nothing is lost.

The caller's thread sends and takes; a thread of each connection puts what comes into a queue, so
replies are seen, with the time of their arrival, while the draft computes.
"""

import random
import re
import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from pipedraft.cli import Failure
from pipedraft.inference.transport import wire
from pipedraft.inference.transport.session_messages import (
    HELLO,
    MAX_BYTES,
    PROTOCOL,
    REPLIES,
    REQUESTS,
    WELCOME,
    Close,
    Description,
    Hello,
    Reply,
    Request,
)

NUMBER = re.compile(r"[0-9]{1,9}")
HOST = re.compile(r"[\w.-]+|\[[\w.:%]+\]")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
"""Between attempts to reach a server; doubled each time."""
CLOSING_S = 2.0
"""For the server's last word, once the output is complete."""
RECOVERABLE = frozenset(
    ["UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "OK"]
)
"""Codes of a connection that broke, or of a server that is not up."""


class SessionLost(Exception):
    """The server does not know the session any more; only the draft's side has the sequence."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where a server is and how it is reached."""

    server: str
    """host:port"""
    uses_tls: bool = False
    root_certificates: bytes | None = None
    """PEM, that the server's certificate is signed by; None: the system's."""
    token: str = ""
    connect_s: float = 10.0
    """For one attempt."""
    answer_s: float = 30.0
    """Without an answer that is owed for so long, the connection counts as broken."""
    give_up_s: float = 60.0
    """Without a server for so long, the output ends in a ``Failure``."""

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if not HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--server: {self.server!r}; give host:port, as 127.0.0.1:50051")


@dataclass(frozen=True)
class Break:
    """How a call ended."""

    code: str
    text: str
    retry_s: float | None = None
    num_passes: int | None = None

    @classmethod
    def of(cls, call: wire.Untyped) -> "Break":
        """The reason a call ended; ``call``: one that is over, or the error that it raised."""
        trailing = dict(call.trailing_metadata() or ())
        texts = (str(trailing.get(name)) for name in (wire.RETRY, wire.NUM_PASSES))
        retry_ms, num_passes = (int(text) if NUMBER.fullmatch(text) else None for text in texts)
        return cls(
            call.code().name,
            " ".join(str(call.details()).split()),
            None if retry_ms is None else retry_ms / 1e3,
            num_passes,
        )


SILENCE = Break("DEADLINE_EXCEEDED", "it does not answer")


@dataclass
class Bytes:
    """Payloads of the messages, without gRPC's 5, HTTP/2's 9 and the headers below."""

    up: int = 0
    down: int = 0
    messages_up: int = 0
    messages_down: int = 0


class Connection:
    """A channel to a server; ``with``."""

    def __init__(self, access: Access) -> None:
        self.grpc, self.access = wire.import_grpc(), access
        self.bytes = Bytes()
        self.num_breaks = 0

    def __enter__(self) -> "Connection":
        access, options = self.access, wire.channel_options(MAX_BYTES)
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

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = self.access.token
        return (("authorization", f"Bearer {token}"),) if token else ()

    def call(self) -> "Call":
        """A stream of a session."""
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        answers = self._session(iter(requests.get, None), metadata=self._metadata)
        return Call(answers, requests, self.bytes, self.grpc.RpcError)

    def describe(self) -> tuple[Description, float]:
        """What the server is, and the round trip of asking, the connection being up."""
        patience = Patience(self.access)
        options = {"metadata": self._metadata, "timeout": self.access.connect_s}
        while True:
            try:
                self._describe(b"", **options)
                started_s = time.monotonic()
                data = self._describe(b"", **options)
                return read_description(data), time.monotonic() - started_s
            except self.grpc.RpcError as error:
                patience.wait(Break.of(error))


def read_description(data: bytes) -> Description:
    """Read how a server describes itself.

    Raises:
        ValueError: not what a server of this version says.
    """
    try:
        about = msgspec.msgpack.decode(data, type=Description)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"server: it does not describe itself ({error}); install the same version on both sides"
        ) from error
    if about.protocol != PROTOCOL:
        raise ValueError(
            f"server: it speaks protocol {about.protocol}, this side {PROTOCOL}; install the same "
            "version on both sides"
        )
    return about


class Patience:
    """How long to go on trying: until the server has been gone for ``give_up_s``."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.progressed()

    def progressed(self) -> None:
        self._since_s, self._wait_s = time.monotonic(), FIRST_WAIT_S

    def wait(self, end: Break) -> None:
        """Wait before the next attempt, if there should be one.

        Raises:
            SessionLost: the server has forgotten the session.
            ValueError: it refuses for good.
            Failure: it has been gone for too long.
        """
        access = self.access
        if end.code == "NOT_FOUND":
            raise SessionLost(end.text)
        if end.code not in RECOVERABLE and end.retry_s is None:
            raise ValueError(f"server: {access.server}: {end.text} ({end.code.lower()})")
        left_s = self._since_s + access.give_up_s - time.monotonic()
        if left_s < 0:
            raise Failure(
                f"server: {access.server} could not be used for {access.give_up_s:g} s ({end.text})"
            )
        # Many clients of one server that went down must not come back at the same moment.
        wait_s = min(self._wait_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
        time.sleep(min(max(wait_s, end.retry_s or 0.0), left_s))
        self._wait_s = 2 * self._wait_s


class Call:
    """One gRPC call; what comes of it, and at last how it ended, goes into ``arrived``."""

    def __init__(
        self,
        answers: wire.Untyped,
        requests: "SimpleQueue[bytes | None]",
        count: Bytes,
        error: type[Exception],
    ) -> None:
        self._answers, self._requests, self._count, self._error = answers, requests, count, error
        self.arrived: SimpleQueue[tuple[bytes | Break, float]] = SimpleQueue()
        threading.Thread(target=self._read, name="replies", daemon=True).start()

    def _read(self) -> None:
        try:
            for data in self._answers:
                self.arrived.put((data, time.monotonic()))
            end = Break.of(self._answers)
        except self._error as error:
            end = Break.of(error)
        self.arrived.put((end, time.monotonic()))

    def write(self, data: bytes) -> None:
        self._count.up += len(data)
        self._count.messages_up += 1
        self._requests.put(data)

    def take(self, timeout_s: float) -> tuple[bytes | Break, float] | None:
        """The next thing that came, with its time; None: nothing did."""
        try:
            data, arrived_s = self.arrived.get(timeout_s > 0, max(timeout_s, 0))
        except Empty:
            return None
        if isinstance(data, bytes):
            self._count.down += len(data)
            self._count.messages_down += 1
        return data, arrived_s

    def hang_up(self) -> None:
        """End it without a word; harmless where the call is over."""
        self._answers.cancel()
        self._requests.put(None)


class SessionStream:
    """One session's messages, over as many connections as it takes."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._patience = connection, Patience(connection.access)
        self._call: Call | None = None
        self._end: Break | None = None
        """Of the latest call; None: it is up, or none was made yet."""
        self._unanswered: dict[int, Request] = {}
        self._ticket, self._next_number = b"", 0
        self._heard_s = time.monotonic()

    @property
    def is_up(self) -> bool:
        return self._call is not None and self._end is None

    def send(self, request: Request) -> None:
        """Put it on its way, or note it for the next connection."""
        if not self._unanswered:
            self._heard_s = time.monotonic()
        self._unanswered[request.seq] = request
        if self.is_up and self._call is not None:
            self._call.write(REQUESTS.to_bytes(request))

    def take(self, *, waits: bool) -> tuple[Reply, float] | None:
        """The next reply and when it arrived; each comes once, in order.

        Args:
            waits: for an answer that is owed; a connection that is down is made again.

        Returns:
            None: nothing has come; it may have been the connection that broke.

        Raises:
            SessionLost, ValueError, Failure: as in ``Patience.wait``; nonsense is a ``ValueError``.
        """
        if not self.is_up:
            self._reconnect()
        assert self._call is not None
        silent_s = self._heard_s + self._connection.access.answer_s
        found = self._call.take(silent_s - time.monotonic() if waits else 0.0)
        if found is None:
            if waits and time.monotonic() >= silent_s:
                self._end = SILENCE
            return None
        data, arrived_s = found
        if isinstance(data, Break):
            self._end = data
            return None
        reply = REPLIES.decode(data)
        if reply.number > self._next_number:
            self._end = Break("UNKNOWN", f"reply {self._next_number} is missing")
            return None
        if reply.number < self._next_number:
            return None
        # Only what is new counts as an answer.
        self._heard_s = arrived_s
        self._patience.progressed()
        self._next_number = reply.number + 1
        self._unanswered = {s: r for s, r in self._unanswered.items() if s > reply.seq}
        return reply, arrived_s

    def _reconnect(self) -> None:
        """Connect, and go on with the session if there is one."""
        while not self.is_up:
            end, self._end = self._end, None
            self.hang_up()
            if end is not None:
                self._connection.num_breaks += bool(self._ticket)
                self._patience.wait(end)
            self._connect()

    def _connect(self) -> None:
        self._call = call = self._connection.call()
        hello = Hello(ticket=self._ticket, next_number=self._next_number)
        call.write(HELLO.to_bytes(hello))
        if not self._ticket:
            call.write(REQUESTS.to_bytes(self._unanswered[0]))
        found = call.take(self._connection.access.connect_s)
        data = SILENCE if found is None else found[0]
        if isinstance(data, Break):
            self._end = data
            return
        welcome = WELCOME.decode(data)
        next_seq = welcome.next_seq if self._ticket else 1
        self._ticket, self._heard_s = welcome.ticket, time.monotonic()
        for seq, request in sorted(self._unanswered.items()):
            if seq >= next_seq:
                call.write(REQUESTS.to_bytes(request))

    def close(self, closing: Close) -> int | None:
        """End the session; the server's last word is how many passes it took.

        Returns:
            Passes over the target after the prompt's; None: unknown.
        """
        self.send(closing)
        until_s = time.monotonic() + CLOSING_S
        while self.is_up and self._call is not None:
            found = self._call.take(until_s - time.monotonic())
            if found is None:
                break
            if isinstance(found[0], Break):
                self._end = found[0]
        self.hang_up()
        return None if self._end is None else self._end.num_passes

    def hang_up(self) -> None:
        """Leave without a word; harmless after ``close``."""
        if self._call is not None:
            self._call.hang_up()
            self._call = None
