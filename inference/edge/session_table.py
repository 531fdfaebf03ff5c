"""Table of a server's open sessions, with limits for admission, queued replies and expiry.

A session lives as long as its stream. The caller passes the current time.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ...models.transformer.stage_cache import MIN_CAPACITY
from . import SessionLimits
from .session_messages import REPLIES, Open, Reply
from .target_session import (
    MAX_PENDING,
    SessionRefused,
    SharedTarget,
    TargetSession,
)

UNSENT_BYTES = 4 * 2**20
"""Unread reply bytes per edge, beyond which the server stops reading the edge's requests."""


class MessageRate:
    """Limit for messages per second, with one-second bursts. The caller passes the time."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_s = -math.inf
        """Time when all messages so far would have passed at this rate."""

    def wait_s(self, now_s: float) -> float:
        """Return the seconds to wait before reading the next message."""
        # now - 1: a long silence earns no more than one second of burst.
        self._free_s = max(self._free_s, now_s - 1) + 1 / self.rate
        return max(0.0, self._free_s - now_s)


@dataclass(eq=False)
class HeldSession:
    """Open session, its memory, and the replies queued for its edge."""

    number: int
    core: TargetSession
    reserved_bytes: int
    opened_s: float
    seen_s: float
    """Time of the edge's last message or pass, or of the last check while the edge waited."""
    num_passes: int = 0
    """Target passes after the prompt's."""
    end: SessionRefused | None = None
    """Reason to end the stream; code OK: the sequence is complete."""

    def __post_init__(self) -> None:
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_unread = 0
        self.drained = asyncio.Event()
        """Cleared while the edge has too many unread replies."""
        self.drained.set()

    def put(self, replies: list[Reply]) -> None:
        for reply in replies:
            data = REPLIES.to_bytes(reply)
            # Never waits: one slow edge must not delay the others' replies.
            self._replies.put_nowait(data)
            self._num_unread += len(data)
        if self._num_unread > UNSENT_BYTES:
            self.drained.clear()

    def finish(self, end: SessionRefused) -> None:
        """End the stream after the queued replies. Only the first call has an effect."""
        self.end = self.end or end
        self._replies.put_nowait(None)

    async def replies(self) -> AsyncIterator[bytes]:
        while (reply := await self._replies.get()) is not None:
            yield reply
            self._num_unread -= len(reply)
            # Only once the queue is empty: else a slow edge would flip the event with every reply.
            if not self._num_unread:
                self.drained.set()


class SessionTable:
    """Open sessions and their memory budget."""

    def __init__(self, target: SharedTarget, limits: SessionLimits, row_bytes: int) -> None:
        """Create an empty table. ``row_bytes`` is the size of one token's keys and values."""
        self.target, self.limits, self.row_bytes = target, limits, row_bytes
        self._max_positions = target.staged().max_positions
        self.held: dict[int, HeldSession] = {}
        """Open sessions, by their number."""
        self.num_opened = self.num_expired = 0
        self.is_draining = False

    @property
    def reserved_bytes(self) -> int:
        return sum(session.reserved_bytes for session in self.held.values())

    @property
    def cache_bytes(self) -> int:
        """Return the bytes allocated now, which are never more than ``reserved_bytes``."""
        return sum(session.core.cache_bytes for session in self.held.values())

    def open(self, opening: Open, now_s: float) -> HeldSession:
        """Open a session and reserve its memory, or raise ``SessionRefused``."""
        reserved = self._admit(opening)
        core = TargetSession(self.target, opening)
        self.num_opened += 1
        session = HeldSession(self.num_opened, core, reserved, opened_s=now_s, seen_s=now_s)
        self.held[session.number] = session
        return session

    def _admit(self, opening: Open) -> int:
        """Return the bytes to reserve for a session, or raise ``SessionRefused``."""
        limits, wanted = self.limits, opening.settings.max_new_tokens
        cache_bytes = limits.max_cache_mb * 2**20
        if self.is_draining:
            raise SessionRefused("server: shutting down; try again", "UNAVAILABLE")
        if len(opening.prompt_ids) > limits.max_prompt_tokens:
            raise SessionRefused(
                f"prompt: {len(opening.prompt_ids)} tokens, this server takes "
                f"{limits.max_prompt_tokens}; shorten the prompt",
            )
        if wanted > limits.max_new_tokens:
            raise SessionRefused(
                f"max_new_tokens: {wanted}, this server gives {limits.max_new_tokens}; ask for "
                "fewer",
            )
        # Reserve the full length: a session, once admitted, must not run out of memory.
        num_tokens = min(len(opening.prompt_ids) + wanted + MAX_PENDING, self._max_positions)
        # Buffers start at MIN_CAPACITY and double.
        reserved = self.row_bytes * max(MIN_CAPACITY, 2 * num_tokens)
        if reserved > cache_bytes:
            raise SessionRefused(
                f"session: its keys and values may take {reserved} bytes, this server has "
                f"{cache_bytes}; ask for a shorter output",
            )
        # Temporary reasons come last, because UNAVAILABLE makes the edge try again.
        for found, limit, what in (
            (len(self.held) + 1, limits.max_sequences, "sessions are open"),
            (self.reserved_bytes + reserved, cache_bytes, "bytes of keys and values are reserved"),
        ):
            if found > limit:
                raise SessionRefused(f"server: {limit} {what}; try again", "UNAVAILABLE")
        return reserved

    def drop(self, session: HeldSession) -> None:
        """Remove a session and its memory, unless it is removed already."""
        self.held.pop(session.number, None)

    def expire(self, now_s: float) -> None:
        """Remove and end expired sessions."""
        for session in list(self.held.values()):
            if session.core.owes:
                session.seen_s = now_s  # an edge waiting for the server is not silent
            if now_s - session.opened_s > self.limits.request_s:
                why = f"session: open for {self.limits.request_s:g} s"
            elif now_s - session.seen_s > self.limits.idle_s:
                why = f"session: silent for {self.limits.idle_s:g} s"
            else:
                continue
            self.drop(session)
            self.num_expired += 1
            text = f"{why}; open a new one with the output so far"
            session.finish(SessionRefused(text, "DEADLINE_EXCEEDED"))
