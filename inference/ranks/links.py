"""Ordered messages between ranks.

Every message is one frame on a ZeroMQ socket. With a ``DeviceLink``, hidden states are sent from
device to device, separately from their frame.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from ...models.speed.cuda_graphs import UNDER_WAY
from ..timeline import Timeline
from .codec import CODEC, AnyMessage, Buffer, Part, Together

MAX_UNSENT = 64
"""Maximum unfinished sends of a device. At this number, a new send waits for the oldest one."""
MEMORY_SIGNS = (
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",  # the same on Windows
    "bad_alloc",  # any other C++ code under torch
    "ALLOC_FAILED",  # cuBLAS and cuDNN workspaces
    "CUDA error: out of memory",  # CUDA itself, past torch's allocator
)


class LostLink(ConnectionError):
    """Raised if the peer is gone or sends invalid messages."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for out-of-memory errors, by type or, for a RuntimeError, by text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ConnectionError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition(". This is typically")[0]  # drop gloo's advice
        raise LostLink(peer, reason) from error


@dataclass(frozen=True)
class DeviceLink:
    """Link in one direction between two accelerators, with its own process group.

    Operations in a group run in posting order. Two links in one group could therefore deadlock,
    each waiting for the other's receiver. ``Work.wait`` without a limit blocks streams, not this
    thread.
    """

    group: dist.ProcessGroup
    device: torch.device

    def open(self, peer: int, sends: bool) -> None:
        """Connect both ranks by sending a number over the link."""
        if sends:
            self.send(torch.zeros(1, device=self.device), peer)[0].wait()
        else:
            self.receive((1,), torch.float32, peer)

    def send(self, array: Tensor, peer: int) -> tuple[dist.Work, Tensor]:
        whole = array.contiguous()
        work = dist.isend(whole, peer, group=self.group)
        assert work is not None
        return work, whole

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Tensor:
        array = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(array, peer, group=self.group)
        assert work is not None
        work.wait()
        return array


class Sender:
    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        peer: int,
        timeline: Timeline,
        device_link: DeviceLink | None = None,
    ) -> None:
        self.peer, self.timeline, self.device_link = peer, timeline, device_link
        self._socket = socket
        # A bound socket has several peers, and a dialing one has only this one.
        self._route: list[bytes] = [b"%d" % peer] if socket.type == zmq.ROUTER else []
        self._apart: deque[tuple[dist.Work, Tensor]] = deque()
        UNDER_WAY.add(self)

    def send(self, message: AnyMessage) -> None:
        with self.timeline.span("send"), _naming(self.peer):
            link = self.device_link
            encoded = CODEC.encode(message, None if link is None else link.device)
            self._socket.send_multipart([*self._route, encoded.data])
            for array in encoded.apart:
                assert link is not None
                if len(self._apart) == MAX_UNSENT:
                    self._apart.popleft()[0].wait()
                self._apart.append(link.send(array, self.peer))

    def is_sending(self) -> bool:
        """Return True while the peer has not received all hidden states from this device."""
        # Sends complete in order, so the oldest tells enough.
        while self._apart and self._apart[0][0].is_completed():
            self._apart.popleft()
        return bool(self._apart)


class Receiver:
    """Messages from one of the peers of a bound socket."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        peer: int,
        waiting: defaultdict[int, deque[Buffer]],
        device_link: DeviceLink | None = None,
    ) -> None:
        """``waiting``: frames by peer, shared by all receivers on the socket."""
        self.peer, self.device_link = peer, device_link
        self._socket, self._waiting = socket, waiting

    def has_arrived(self) -> bool:
        while not self._waiting[self.peer] and self._socket.poll(0):
            self._take()
        return bool(self._waiting[self.peer])

    def receive(self) -> AnyMessage:
        """Wait for the next message and return it, or raise ``LostLink``."""
        with _naming(self.peer):
            while not self._waiting[self.peer]:
                self._take()
            link = self.device_link
            fetch = None if link is None else partial(link.receive, peer=self.peer)
            return CODEC.decode(self._waiting[self.peer].popleft(), fetch)

    def _take(self) -> None:
        sender, frame = self._socket.recv_multipart(copy=False)
        self._waiting[int(bytes(sender.buffer))].append(frame.buffer)


class Answers:
    """Answers from the stages, sorted by sequence.

    Answers for a sequence without a live ``Mailbox`` are dropped.
    """

    def __init__(self, links: "Sequence[Inbox]") -> None:
        """Sort answers from ``links``, which has one link per stage."""
        self._links = links
        self._num_opened = 0
        self._open: WeakValueDictionary[int, Mailbox] = WeakValueDictionary()

    def open(self) -> "Mailbox":
        """Open a mailbox for one more sequence. The first mailbox has slot 0."""
        box = Mailbox(self, self._num_opened, [deque() for _ in self._links])
        self._open[box.slot] = box
        self._num_opened += 1
        return box

    def has_arrived(self, stage: int) -> bool:
        return self._links[stage].has_arrived()

    def sort(self, stage: int) -> None:
        """Wait for a stage's next message and deliver its parts."""
        message = self._links[stage].receive()
        for part in message.parts if isinstance(message, Together) else [message]:
            # A sequence may end with answers on their way; nobody waits for those.
            if part.slot in self._open:
                self._open[part.slot].waiting[stage].append(part)


@dataclass(eq=False)
class Mailbox:
    """One sequence's answers from every stage."""

    answers: Answers
    slot: int
    waiting: list[deque[AnyMessage]]

    def has_arrived(self, stage: int) -> bool:
        while not self.waiting[stage] and self.answers.has_arrived(stage):
            self.answers.sort(stage)
        return bool(self.waiting[stage])

    def receive(self, stage: int) -> AnyMessage:
        """Wait for a stage's next answer and return it."""
        while not self.waiting[stage]:
            self.answers.sort(stage)
        return self.waiting[stage].popleft()


class Local:
    """Link inside one process. ``handle`` takes messages at once. Without it, they are queued."""

    def __init__(self, handle: Callable[[AnyMessage], None] | None = None) -> None:
        self._handle = handle
        self._waiting: deque[AnyMessage] = deque()

    def send(self, message: AnyMessage) -> None:
        if self._handle is None:
            self._waiting.append(message)
        else:
            self._handle(message)

    def has_arrived(self) -> bool:
        return bool(self._waiting)

    def receive(self) -> AnyMessage:
        return self._waiting.popleft()

    def take_parts(self) -> list[Part]:
        """Remove and return all waiting messages, which must be message parts."""
        taken = cast(list[Part], list(self._waiting))
        self._waiting.clear()
        return taken


Inbox: TypeAlias = Receiver | Local
Outbox: TypeAlias = Sender | Local
