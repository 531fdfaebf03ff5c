"""Target behind a virtual link. The models compute real tokens, but all times are simulated.

The draft and the target each run one forward pass at a time. Messages cross a ``Channel`` in
encoded form and are decoded on the other side.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...errors import check_ranges
from . import session_messages as messages
from .channel import Channel, Direction, Link, LinkEstimate, LinkState, Transmission
from .draft_length import Estimates
from .pipeline import LinkedPipeline, RemoteTarget
from .session_messages import REPLIES, REQUESTS, Open, Reply, Request, Settings
from .target_session import SharedTarget, TargetSession


@dataclass(frozen=True, kw_only=True)
class Times:
    """Compute times in seconds."""

    draft_s: float
    """Time for one draft token on the edge."""
    verify_s: float
    """Time for the target's pass over one row."""
    verify_row_s: float = 0.0
    """Time that each further row adds to this pass."""
    cloud_draft_s: float
    """Time for one draft token on the target's machine."""
    alone_s: float | None = None
    """Time for one token if the target decodes alone; None: ``verify_s``."""
    edge_layer_s: float = 0.0
    """Time for one target layer over one row on the edge."""
    prompt_row_s: float = 0.0
    """Time for the draft's pass over one prompt token on the edge, which overlaps with the target's
    pass over the prompt."""
    jitter: float = 0.0
    """Maximum deviation of each draft and target pass, as a fraction of its time; drawn uniformly
    from -``jitter`` to ``jitter``."""

    def __post_init__(self) -> None:
        ranges = dict.fromkeys(vars(self), "[0, inf)")
        check_ranges(self, ranges | {"jitter": "[0, 1]"}, "times.")

    def forward_s(self, num_rows: int, *, alone: bool = False) -> float:
        if alone and num_rows == 1 and self.alone_s is not None:
            return self.alone_s
        return self.verify_s + self.verify_row_s * (num_rows - 1)


_Event = tuple[float, int, Callable[[], None]]
"""Time, place among events of the same time, and what happens."""


@dataclass
class _Flying:
    sent: Transmission
    event: _Event


class SimulatedPipeline(LinkedPipeline):
    """Pipeline to a target behind a virtual link, with a virtual clock.

    The clock advances from event to event while the draft computes or waits for a reply.
    """

    def __init__(
        self,
        target: RemoteTarget,
        shared: SharedTarget,
        link: Link,
        times: Times,
        *,
        is_colocated: bool = False,
        token_bytes: int = 0,
    ) -> None:
        """
        Args:
            is_colocated: True if the draft runs next to the target. Only the prompt then crosses
                the link.
            token_bytes: bytes that the edge sends with each draft token, in addition to its id.
        """
        super().__init__(target)
        self.shared, self.link, self.times, self.is_colocated = shared, link, times, is_colocated
        self.token_bytes = token_bytes
        self.draft_s = times.cloud_draft_s if is_colocated else times.draft_s
        self._now_s = 0.0

    def _begin(self) -> Estimates:
        # A prompt's losses must not depend on the prompts before it.
        seed = self.settings.seed * 1_000_003 + self.settings.prompt
        self.channel = Channel(self.link, seed=seed)
        """Channel for this prompt. It also counts the traffic."""
        self.num_passes = 0
        """Number of target passes, without the pass over the prompt."""
        self._session: TargetSession | None = None
        self._events: list[_Event] = []
        self._flying: dict[Direction, list[_Flying]] = {"up": [], "down": []}
        # Ties in the heap keep their order; callables cannot be compared.
        self._order = itertools.count()
        # Separate generators: another draft token must not change the target's times.
        self._jitter = [np.random.default_rng([seed, side]) for side in range(2)]
        self._drafts_from_s = 0.0
        state, header_bytes = self.link.state(0.0), self.link.header_bytes
        if self.is_colocated:
            state = LinkState(up_bytes_per_s=math.inf, down_bytes_per_s=math.inf, round_trip_s=0.0)
            header_bytes = 0
        return Estimates(
            draft_s=self.draft_s,
            verify_s=self.times.verify_s,
            verify_row_s=self.times.verify_row_s,
            link=LinkEstimate(state),
            header_bytes=header_bytes,
        )

    def close(self) -> int:
        super().close()
        return self.num_passes

    # -- time -------------------------------------------------------------------------------

    def open_link(self, settings: Settings, *, streams: bool) -> None:
        super().open_link(settings, streams=streams)
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def drafted(self, num_tokens: int, started_s: float) -> None:
        if self._drafts_from_s > self._now_s:
            self._pass_time(self._drafts_from_s)
            started_s = self._now_s
        for _ in range(num_tokens):
            self._pass_time(self._now_s + self.draft_s * self._deviation(0))
        self._hear_of_link()
        super().drafted(num_tokens, started_s)

    def _deviation(self, side: int) -> float:
        """Return a random factor for the next pass of the draft (0) or the target (1)."""
        jitter = self.times.jitter
        return 1.0 + jitter * self._jitter[side].uniform(-1, 1) if jitter else 1.0

    def _wait(self) -> None:
        self._hear_of_link()
        self._pass_time(math.inf)

    def _pass_time(self, until_s: float) -> None:
        """Advance the clock to ``until_s``, or to the next event if ``until_s`` is infinite."""
        while True:
            # Before time moves: a free target starts with what has arrived.
            self._compute()
            next_s = min(self._events[0][0], until_s) if self._events else until_s
            assert next_s < math.inf, "draft and target wait for each other"
            self._now_s = next_s
            # Process all events at one moment before anyone reacts to them.
            while self._events and self._events[0][0] == next_s:
                heapq.heappop(self._events)[2]()
            if until_s in (next_s, math.inf):
                return

    def _hear_of_link(self) -> None:
        """Set the estimated bandwidths to the link's current ones, as a radio would report them."""
        if not self.is_colocated:
            state = self.link.state(self._now_s)
            self.estimates.link.set_bandwidth(
                up_bytes_per_s=state.up_bytes_per_s, down_bytes_per_s=state.down_bytes_per_s
            )

    def _at(self, time_s: float, event: Callable[[], None]) -> _Event:
        entry = time_s, next(self._order), event
        heapq.heappush(self._events, entry)
        return entry

    # -- the target's side ------------------------------------------------------------------

    def _compute(self) -> None:
        session = self._session
        if session is None or session.is_running:
            return
        is_prompt = session.wants_prefill
        num_rows = session.start(self._now_s)
        if num_rows:
            # Compute now, deliver at the virtual end. The session stores requests in between.
            session.run()
            self.num_passes += not is_prompt
            alone = session.is_streaming and not is_prompt
            pass_s = self.times.forward_s(num_rows, alone=alone) * self._deviation(1)
            self._at(self._now_s + pass_s, lambda: self._send_down(session.finish(self._now_s)))

    # -- messages ---------------------------------------------------------------------------

    def _transmit(self, num_bytes: int, direction: Direction, deliver: Callable[[], None]) -> None:
        """Send a message, and call ``deliver`` when it has arrived."""
        if self.is_colocated:
            self._at(self._now_s, deliver)
            return
        flying = self._flying[direction]
        flying[:] = [other for other in flying if other.sent.arrival_s > self._now_s]
        before_s = [other.sent.arrival_s for other in flying]
        sent = self.channel.send(self._now_s, num_bytes, direction)
        if before_s != [other.sent.arrival_s for other in flying]:
            # The message reveals losses: those before it arrive earlier, in the same order.
            old = {id(other.event) for other in flying}
            self._events = [event for event in self._events if id(event) not in old]
            heapq.heapify(self._events)
            for other in flying:
                other.event = self._at(other.sent.arrival_s, other.event[2])
        flying.append(_Flying(sent, self._at(sent.arrival_s, deliver)))

    def _size(self, request: Request) -> int:
        ids = request.ids if isinstance(request, messages.Preverify | messages.Verify) else []
        return super()._size(request) + self.token_bytes * len(ids)

    def _send(self, request: Request) -> None:
        # Encoded although both sides share a process: sizes are real, and no object is shared.
        data = REQUESTS.to_bytes(request)
        if self.is_colocated and isinstance(request, Open):
            # The user is on the edge, wherever the draft runs: the prompt crosses the link.
            self._now_s = self.channel.transmit(0.0, len(data), "up")
        elif isinstance(request, Open):
            # The draft reads the prompt while it crosses the link and the target reads it.
            prompt_s = self.times.prompt_row_s * len(request.prompt_ids)
            self._drafts_from_s = self._now_s + prompt_s

        self._transmit(self._size(request), "up", partial(self._receive, data))

    def _receive(self, data: bytes) -> None:
        request = REQUESTS.decode(data)
        if isinstance(request, Open):
            self._session = TargetSession(self.shared, request)
        else:
            assert self._session is not None
            self._send_down(self._session.receive(request, self._now_s))

    def _send_down(self, replies: list[Reply]) -> None:
        for reply in replies:
            data = REPLIES.to_bytes(reply)
            self._transmit(len(data), "down", partial(self._arrive, data))

    def _arrive(self, data: bytes) -> None:
        self._inbox.append((REPLIES.decode(data), self._now_s))
