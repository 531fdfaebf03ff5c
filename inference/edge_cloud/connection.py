"""The edge's end of a stream: it is made again when it breaks, and nothing is lost with it."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipedraft.errors import Failure
from pipedraft.inference.edge_cloud import wire
from pipedraft.inference.edge_cloud.messages import (
    MAX_BYTES,
    Close,
    Reply,
    Request,
    decode_reply,
    encode,
)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
"""Between attempts to reach a server; doubled each time."""
CLOSING_S = 2.0
"""For the server's last word, once the text is complete."""
MENDABLE = frozenset(["UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "OK"])
"""Codes of a connection that broke, or of a server that is not up."""


class SessionLost(Exception):
    """The server does not know the session any more; the text so far is the edge's."""


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
    """Without a server for so long, the text ends in a ``Failure``."""

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--server: {self.server!r}; give host:port, as 127.0.0.1:50051")


@dataclass(frozen=True)
class Break:
    """How a call ended."""

    code: str
    text: str
    retry_s: float | None = None
    num_passes: int | None = None

    @classmethod
    def of(cls, code: Any, text: Any, metadata: Any) -> "Break":
        trailing = dict(metadata or ())
        retry, passes = trailing.get(wire.RETRY), trailing.get(wire.NUM_PASSES)
        return cls(
            code.name,
            " ".join(str(text).split()),
            None if retry is None else int(retry) / 1e3,
            None if passes is None else int(passes),
        )

    @classmethod
    def of_error(cls, error: Any) -> "Break":
        return cls.of(error.code(), error.details(), error.trailing_metadata())


SILENCE = Break("DEADLINE_EXCEEDED", "it does not answer")


@dataclass
class Bytes:
    """Payloads of the messages, without gRPC's 5, HTTP/2's 9 and the headers below."""

    up: int = 0
    down: int = 0
    messages_up: int = 0
    messages_down: int = 0


class Connection:
    """A channel to a server; ``async with``."""

    def __init__(self, access: Access) -> None:
        self.grpc, self.access = wire.import_grpc(), access
        self.bytes = Bytes()
        self.num_breaks = 0

    async def __aenter__(self) -> "Connection":
        access, options = self.access, wire.channel_options(MAX_BYTES)
        if access.uses_tls:
            credentials = self.grpc.ssl_channel_credentials(access.root_certificates)
            self._channel = self.grpc.aio.secure_channel(access.server, credentials, options)
        else:
            self._channel = self.grpc.aio.insecure_channel(access.server, options)
        self._describe = self._channel.unary_unary(f"/{wire.SERVICE}/Describe")
        self._session = self._channel.stream_stream(f"/{wire.SERVICE}/Session")
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._channel.close()

    @property
    def _options(self) -> dict[str, Any]:
        token = self.access.token
        return {"metadata": (("authorization", f"Bearer {token}"),) if token else ()}

    def open_stream(self) -> Any:
        return self._session(**self._options)

    async def describe(self) -> tuple[wire.Description, float]:
        """What the server is, and the round trip of asking, the connection being up."""
        patience, options = Patience(self), {**self._options, "timeout": self.access.connect_s}
        while True:
            try:
                await self._describe(b"", **options)
                started_s = time.monotonic()
                data = await self._describe(b"", **options)
                round_trip_s = time.monotonic() - started_s
                break
            except self.grpc.aio.AioRpcError as error:
                await patience.wait(Break.of_error(error))
        about = wire.decode(data, wire.Description)
        if about.protocol != wire.PROTOCOL:
            raise ValueError(
                f"server: it speaks protocol {about.protocol}, this edge {wire.PROTOCOL}; install "
                "the same version on both sides"
            )
        return about, round_trip_s


class Patience:
    """How long to go on trying: until the server has been gone for ``give_up_s``."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.progressed()

    def progressed(self) -> None:
        self._since_s, self._wait_s = time.monotonic(), FIRST_WAIT_S

    async def wait(self, end: Break) -> None:
        """Wait before the next attempt, if there should be one.

        Raises:
            SessionLost: the server has forgotten the session.
            ValueError: it refuses for good.
            Failure: it has been gone for too long.
        """
        access = self.connection.access
        if end.code == "NOT_FOUND":
            raise SessionLost(end.text)
        if end.code not in MENDABLE and end.retry_s is None:
            raise ValueError(f"server: {access.server}: {end.text} ({end.code.lower()})")
        if time.monotonic() - self._since_s > access.give_up_s:
            raise Failure(
                f"server: {access.server} could not be used for {access.give_up_s:g} s ({end.text})"
            )
        wait_s = max(self._wait_s, end.retry_s or 0.0)
        # Many edges of one server that went down must not come back at the same moment.
        await asyncio.sleep(min(wait_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0))
        self._wait_s = 2 * self._wait_s


class EdgeStream:
    """One session's messages, over as many connections as it takes."""

    def __init__(self, connection: Connection, receive: Callable[[Reply], None]) -> None:
        """``receive``: gets each reply once, in order, from the event loop."""
        self._connection, self._receive = connection, receive
        self._patience = Patience(connection)
        self._call: Any = None
        self._reading: asyncio.Task | None = None
        self._end: Break | None = None
        """Of the latest call; None: it is up, or none was made yet."""
        self._nonsense: ValueError | None = None
        """What the server sent is no message."""
        self._unanswered: dict[int, Request] = {}
        self._ticket, self._next_number = b"", 0
        self._heard_s = time.monotonic()
        self._changed = asyncio.Event()
        """A reply came, or the stream broke."""

    @property
    def is_up(self) -> bool:
        return self._call is not None and self._end is None

    async def send(self, request: Request) -> None:
        """Returns when it is on its way, or noted for the next connection."""
        if not self._unanswered:
            self._heard_s = time.monotonic()
        self._unanswered[request.seq] = request
        if self.is_up:
            await self._write(encode(request))
        elif not isinstance(request, Close):
            await self.mend()

    async def mend(self) -> None:
        """Connect, and go on with the session if there is one.

        Raises:
            SessionLost, ValueError, Failure: as in ``Patience.wait``.
        """
        while not self.is_up:
            end, self._end = self._end, None
            await self.hang_up()
            if end is not None:
                self._connection.num_breaks += bool(self._ticket)
                await self._patience.wait(end)
            await self._connect()

    async def _connect(self) -> None:
        access = self._connection.access
        self._call = self._connection.open_stream()
        hello = wire.Hello(ticket=self._ticket, next_number=self._next_number)
        first = [hello] if self._ticket else [hello, self._unanswered[0]]
        for message in first:
            await self._write(encode(message))
        data = await self._next(self._call, access.connect_s) if self.is_up else None
        if data is None:
            return
        welcome = wire.decode(data, wire.Welcome)
        next_seq = welcome.next_seq if self._ticket else 1
        self._ticket, self._heard_s = welcome.ticket, time.monotonic()
        self._reading = asyncio.create_task(self._read(self._call))
        for seq, request in sorted(self._unanswered.items()):
            if seq >= next_seq:
                await self._write(encode(request))

    async def _write(self, data: bytes) -> None:
        """A failure is noted: ``mend`` sends everything again."""
        connection, call = self._connection, self._call
        connection.bytes.up += len(data)
        connection.bytes.messages_up += 1
        try:
            async with asyncio.timeout(connection.access.answer_s):
                await call.write(data)
        except connection.grpc.aio.AioRpcError as error:
            self._fail(Break.of_error(error))
        except TimeoutError:
            self._fail(SILENCE)
        except asyncio.InvalidStateError:  # the call is over; its status says why
            self._fail(await self._status(call))

    async def _next(self, call: Any, timeout_s: float | None) -> bytes | None:
        """None: the call has ended, which is noted."""
        connection = self._connection
        try:
            async with asyncio.timeout(timeout_s):
                data = await call.read()
        except connection.grpc.aio.AioRpcError as error:
            self._fail(Break.of_error(error))
            return None
        except TimeoutError:
            self._fail(SILENCE)
            return None
        if data is connection.grpc.aio.EOF:
            self._fail(await self._status(call))
            return None
        connection.bytes.down += len(data)
        connection.bytes.messages_down += 1
        return data

    async def _status(self, call: Any) -> Break:
        return Break.of(await call.code(), await call.details(), await call.trailing_metadata())

    async def _read(self, call: Any) -> None:
        while (data := await self._next(call, None)) is not None:
            try:
                reply = decode_reply(data)
            except ValueError as error:
                self._nonsense = error
                self._changed.set()
                return
            self._heard_s = time.monotonic()
            self._patience.progressed()
            if reply.number > self._next_number:
                self._fail(Break("UNKNOWN", f"reply {self._next_number} is missing"))
                return
            if reply.number == self._next_number:
                self._next_number = reply.number + 1
                self._unanswered = {s: r for s, r in self._unanswered.items() if s > reply.seq}
                self._receive(reply)
            self._changed.set()

    def _fail(self, end: Break) -> None:
        self._end = self._end or end
        self._changed.set()

    async def wait(self, until_s: float) -> None:
        """For an answer that is owed, until a time at most.

        Raises:
            ValueError: the server has sent nonsense.
        """
        silent_s = self._heard_s + self._connection.access.answer_s
        left_s = min(until_s, silent_s) - time.monotonic()
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            if time.monotonic() >= silent_s:
                self._fail(SILENCE)
        self._changed.clear()
        if self._nonsense is not None:
            raise self._nonsense

    async def close(self) -> int | None:
        """End the call; after the session's ``Close`` the server says how many passes it took.

        Returns:
            Passes over the target after the prompt's; None: unknown.
        """
        if self._reading is not None and self.is_up:
            await asyncio.wait([self._reading], timeout=CLOSING_S)
        await self.hang_up()
        return None if self._end is None else self._end.num_passes

    async def hang_up(self) -> None:
        """Without a word; harmless after ``close``."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            self._reading = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
