"""The sessions that a server holds: who may open one, who may go on with it, and when it expires.

The clock is the caller's.
"""

import asyncio
import hmac
import math
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from pipedraft.inference.transport import ServerLimits
from pipedraft.inference.transport.session_messages import REPLIES, More, Open, Reply, Request
from pipedraft.inference.transport.target_session import MAX_PENDING, SharedTarget, TargetSession
from pipedraft.models.stage_cache import MIN_CAPACITY

KEY_BYTES, SECRET_BYTES = 8, 16
LEAST_RETRY_S = 0.1
MAX_RETAINED_BYTES = 32 * 2**20
"""Of one session's replies that its edge may not have; a well-behaved one needs two payloads."""
UNSENT_BYTES = 4 * 2**20
"""A stream whose edge leaves so many unread is not read from any more."""


class Refused(ValueError):
    """A stream that ends with a status; the message is one line for its client."""

    def __init__(self, code: str, text: str, *, retry_s: float | None = None) -> None:
        """
        Args:
            code: name of a ``grpc.StatusCode``.
            retry_s: try again after so long; None: it would be refused again.
        """
        super().__init__(text)
        self.code, self.retry_s = code, retry_s


class Pace:
    """A limit of so many messages in a second, as many at once; the clock is the caller's."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_s = -math.inf
        """When all messages so far would have been let through at this rate."""

    def wait_s(self, now_s: float) -> float:
        """Seconds before the message after this one is read."""
        self._free_s = max(self._free_s, now_s - 1) + 1 / self.rate
        return max(0.0, self._free_s - now_s)


class ReplyStream:
    """Replies on their way to one connected edge."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.session: HeldSession | None = None
        self.end: Refused | None = None
        """Why the stream is to end; one with code OK: the sequence is complete."""
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_unread = 0
        self._drained = asyncio.Event()
        self._drained.set()

    def put(self, replies: list[bytes]) -> None:
        for reply in replies:
            self._replies.put_nowait(reply)
            self._num_unread += len(reply)
        if self._num_unread > UNSENT_BYTES:
            self._drained.clear()

    def finish(self, end: Refused) -> None:
        """End it after what was put; the first call counts."""
        self.end = self.end or end
        self._replies.put_nowait(None)

    async def drained(self) -> None:
        """Wait until the edge has read nearly all."""
        await self._drained.wait()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (reply := await self._replies.get()) is not None:
            yield reply
            self._num_unread -= len(reply)
            if not self._num_unread:
                self._drained.set()


@dataclass
class HeldSession:
    """A session with or without a stream."""

    ticket: bytes
    core: TargetSession
    reserved_bytes: int
    opened_s: float
    seen_s: float
    """When its edge was last heard of."""
    client: str = ""
    """Whose it is, as the server tells clients apart."""
    stream: ReplyStream | None = None
    """None: the edge is away, and nothing is computed for it."""
    num_passes: int = 0
    """After the prompt's."""
    retained: deque[tuple[Reply, bytes]] = field(default_factory=deque)
    """Replies that the edge may not have read."""
    retained_bytes: int = 0

    @property
    def name(self) -> str:
        """Name in a log; it opens nothing."""
        return self.ticket[:4].hex()

    def finish(self, end: Refused) -> None:
        """End the stream of its edge, if it has one."""
        if self.stream is not None:
            self.stream.finish(end)

    def add(self, replies: list[Reply]) -> list[bytes]:
        """Encode replies, and remember them until the edge shows that it has read them."""
        encoded = [REPLIES.to_bytes(reply) for reply in replies]
        self.retained.extend(zip(replies, encoded, strict=True))
        self.retained_bytes += sum(map(len, encoded))
        if self.retained_bytes > MAX_RETAINED_BYTES:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"session: {self.retained_bytes} bytes of replies wait for this edge; read them",
            )
        return encoded

    def note(self, request: Request, now_s: float) -> None:
        """A request of an epoch shows that what ended the one before has been read."""
        self.seen_s = now_s
        reads_all = isinstance(request, More)
        while self.retained and (reads_all or self.retained[0][0].epoch < request.epoch):
            self.retained_bytes -= len(self.retained.popleft()[1])

    def since(self, number: int) -> list[bytes]:
        """Encoded replies from a number on."""
        return [data for reply, data in self.retained if reply.number >= number]


class SessionTable:
    def __init__(self, target: SharedTarget, limits: ServerLimits, row_bytes: int) -> None:
        """
        Args:
            row_bytes: keys and values of one token.
        """
        self.target, self.limits, self.row_bytes = target, limits, row_bytes
        self._max_positions = target.staged().max_positions
        self.held: dict[bytes, HeldSession] = {}
        self.num_opened = self.num_expired = 0
        self.is_draining = False
        self.prefilled: Counter[str] = Counter()
        """Tokens of prompts that were computed for a client; forgotten by and by."""
        self._lasts_s = 1.0
        """A session; a mean over the latest that ended."""
        self._expected: dict[str, float] = {}
        """Client that was refused -> when it was told to come again."""

    @property
    def has_room(self) -> bool:
        return not self.is_draining and len(self.held) < self.limits.max_sessions

    def turn(self, session: HeldSession) -> tuple[int, float]:
        """Sorts sessions: a prompt of the client that has had least, then who waited longest."""
        has_had = self.prefilled[session.client] if session.core.wants_prefill else 0
        return has_had, session.seen_s

    @property
    def reserved_bytes(self) -> int:
        return sum(session.reserved_bytes for session in self.held.values())

    @property
    def cache_bytes(self) -> int:
        """Allocated now; never more than ``reserved_bytes``."""
        return sum(session.core.cache_bytes for session in self.held.values())

    def open(self, opening: Open, now_s: float, client: str = "") -> HeldSession:
        """Open a session for a client, and reserve its memory.

        Raises:
            Refused: no room, or more is asked for than the server allows.
        """
        reserved = self._admit(opening, now_s, client)
        self._expected.pop(client, None)
        key = secrets.token_bytes(KEY_BYTES)
        session = HeldSession(
            key + secrets.token_bytes(SECRET_BYTES),
            TargetSession(self.target),
            reserved,
            opened_s=now_s,
            seen_s=now_s,
            client=client,
        )
        self.held[key] = session
        self.num_opened += 1
        return session

    def _retry_s(self, now_s: float, client: str, holders: Collection[HeldSession]) -> float:
        """When one of ``holders`` is likely to have ended, for the last in the line of clients.

        n sessions that last s seconds each leave a place every s / n seconds.
        """
        self._expected = {c: t for c, t in self._expected.items() if t > now_s and c != client}
        ages_s = sum(now_s - session.opened_s for session in holders)
        every_s = max(self._lasts_s, ages_s / len(holders)) / len(holders)
        line_s = (len(self._expected) + 1) * every_s
        retry_s = min(max(line_s, LEAST_RETRY_S), self.limits.session_s)
        self._expected[client] = now_s + retry_s
        return retry_s

    def _admit(self, opening: Open, now_s: float, client: str) -> int:
        limits, wanted = self.limits, opening.settings.max_new_tokens
        cache_bytes = limits.max_cache_mb * 2**20
        if self.is_draining:
            raise Refused("UNAVAILABLE", "server: shutting down; try again", retry_s=1.0)
        if len(opening.prompt_ids) > limits.max_prompt_tokens:
            raise Refused(
                "INVALID_ARGUMENT",
                f"prompt: {len(opening.prompt_ids)} tokens, this server takes "
                f"{limits.max_prompt_tokens}; shorten the prompt",
            )
        if wanted > limits.max_new_tokens:
            raise Refused(
                "INVALID_ARGUMENT",
                f"max_new_tokens: {wanted}, this server gives {limits.max_new_tokens}; ask for "
                "fewer",
            )
        reserved = self.row_bytes * self._max_rows(len(opening.prompt_ids) + wanted)
        if reserved > cache_bytes:
            raise Refused(
                "INVALID_ARGUMENT",
                f"session: its keys and values may take {reserved} bytes, this server has "
                f"{cache_bytes}; ask for a shorter output",
            )
        all_held = list(self.held.values())
        own = [session for session in all_held if session.client == client]
        num_bytes = self.reserved_bytes + reserved
        for found, limit, holders, what in (
            (len(all_held) + 1, limits.max_sessions, all_held, "sessions are open"),
            (len(own) + 1, limits.max_client_sessions, own, "sessions of this client are open"),
            (num_bytes, cache_bytes, all_held, "bytes of keys and values are given away"),
        ):
            if found > limit:
                retry_s = self._retry_s(now_s, client, holders)
                text = f"server: {limit} {what}; try again in about {retry_s:.1f} s"
                raise Refused("RESOURCE_EXHAUSTED", text, retry_s=retry_s)
        return reserved

    def _max_rows(self, num_tokens: int) -> int:
        """Rows of a session's buffers at the most: they double from ``MIN_CAPACITY``."""
        return max(MIN_CAPACITY, 2 * min(num_tokens + MAX_PENDING, self._max_positions))

    def find(self, ticket: bytes, now_s: float) -> HeldSession:
        """The session of a ticket, which proves that it is its client's.

        Raises:
            Refused: no such session; whether key or secret was wrong is not said.
        """
        session = self.held.get(ticket[:KEY_BYTES])
        if session is None or not hmac.compare_digest(session.ticket, ticket):
            raise Refused(
                "NOT_FOUND",
                "session: unknown here; it has expired or the server was restarted, open a new one "
                "with the output so far",
            )
        session.seen_s = now_s
        return session

    def drop(self, session: HeldSession) -> None:
        if self.held.pop(session.ticket[:KEY_BYTES], None) is not None:
            self._lasts_s += (session.seen_s - session.opened_s - self._lasts_s) / 16

    def expire(self, now_s: float) -> list[tuple[HeldSession, str]]:
        """Drop the sessions whose time is over; each with the line for its edge."""
        over = []
        self.prefilled = Counter({name: n * 7 // 8 for name, n in self.prefilled.items() if n > 8})
        for session in list(self.held.values()):
            if session.stream is not None and session.core.owes:
                session.seen_s = now_s  # who waits for the server is not silent
            if now_s - session.opened_s > self.limits.session_s:
                over.append((session, f"session: open for {self.limits.session_s:g} s"))
            elif now_s - session.seen_s > self.limits.idle_s:
                over.append((session, f"session: silent for {self.limits.idle_s:g} s"))
        for session, _ in over:
            session.seen_s = now_s  # it held its place until now
            self.drop(session)
            self.num_expired += 1
        return over
