"""A session on the virtual clock: real networks make the tokens, constants make the time.

Edge and cloud each compute one thing at a time. Messages cross a ``Channel`` as the bytes they are
encoded to, and are decoded on the other side.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipedraft.inference.channel import Channel, Direction
from pipedraft.inference.edge_cloud.cloud import CloudSession
from pipedraft.inference.edge_cloud.edge import EdgeSession
from pipedraft.inference.edge_cloud.messages import (
    Reply,
    decode_reply,
    decode_request,
    encode,
)
from pipedraft.inference.edge_cloud.plan import Draft, Finished, Send, Wait


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of computing."""

    draft_s: float
    """One draft token on the edge."""
    verify_s: float
    """The cloud's pass over one row."""
    verify_row_s: float = 0.0
    """Each further row."""
    cloud_draft_s: float
    """One draft token where the target runs."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"times.{name}: {value} is no duration; give 0 or more, finite")

    def forward_s(self, num_rows: int) -> float:
        return self.verify_s + self.verify_row_s * (num_rows - 1)


class Carrier(Protocol):
    def transmit(self, now_s: float, num_bytes: int, direction: Direction) -> float:
        """Arrival time of a message."""


class SameMachine:
    """No link: edge and cloud share a machine."""

    def transmit(self, now_s: float, num_bytes: int, direction: Direction) -> float:
        return now_s


class VirtualRun:
    """One edge and one cloud session, event by event."""

    def __init__(
        self,
        edge: EdgeSession,
        cloud: CloudSession,
        carrier: Carrier,
        times: Times,
        *,
        draft_s: float,
        start_s: float = 0.0,
    ) -> None:
        """``draft_s``: of one draft token, wherever the draft runs."""
        self.edge, self.cloud, self.carrier, self.times = edge, cloud, carrier, times
        self.draft_s, self.now_s = draft_s, start_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_drafting = self._is_computing = False
        self._has_finished = False
        self._alarm_s = math.inf

    def run(self) -> float:
        """To the end of the text; returns the time at which the edge has it."""
        while True:
            self._edge_turn()
            self._cloud_turn()
            if self._has_finished:
                return self.now_s
            if not self._events:
                raise RuntimeError("edge and cloud wait for each other")
            self.now_s = self._events[0][0]
            # What happens at the same moment is all known before anyone acts on it.
            while self._events and self._events[0][0] == self.now_s:
                heapq.heappop(self._events)[2]()

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _edge_turn(self) -> None:
        while not self._is_drafting and not self._has_finished:
            if isinstance(self.carrier, Channel):
                state = self.carrier.link.state(self.now_s)
                self.edge.beliefs.link.set_bandwidth(
                    up_bytes_per_s=state.up_bytes_per_s, down_bytes_per_s=state.down_bytes_per_s
                )
            match self.edge.act(self.now_s):
                case Send(request=request):
                    data = encode(request)
                    arrival_s = self.carrier.transmit(self.now_s, len(data), "up")
                    self._at(arrival_s, lambda data=data: self._to_cloud(data))  # type: ignore[misc]
                case Draft():
                    self._is_drafting = True
                    self.edge.draft()
                    self._at(self.now_s + self.draft_s, self._end_draft)
                case Wait(until_s=until_s):
                    if until_s < math.inf and until_s != self._alarm_s:
                        self._alarm_s = until_s
                        self._at(until_s, lambda: None)
                    return
                case Finished():
                    self._has_finished = True

    def _end_draft(self) -> None:
        self._is_drafting = False
        self.edge.drafted(self.now_s)

    def _to_cloud(self, data: bytes) -> None:
        self._send_down(self.cloud.receive(decode_request(data), self.now_s))

    def _cloud_turn(self) -> None:
        if self._is_computing:
            return
        num_rows = self.cloud.start(self.now_s)
        if num_rows:
            self._is_computing = True
            self.cloud.run()
            self._at(self.now_s + self.times.forward_s(num_rows), self._end_forward)

    def _end_forward(self) -> None:
        self._is_computing = False
        self._send_down(self.cloud.finish(self.now_s))

    def _send_down(self, replies: list[Reply]) -> None:
        for reply in replies:
            data = encode(reply)
            arrival_s = self.carrier.transmit(self.now_s, len(data), "down")
            self._at(
                arrival_s,
                lambda data=data: self.edge.receive(decode_reply(data), self.now_s),  # type: ignore[misc]
            )
