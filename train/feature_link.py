"""Hidden states on demand, the trainer's side: questions to a server that holds the target.

A frame is a header and a payload. The payload of a question is a safetensors file with ``ids``
(int32 [M]), ``lengths`` (int32 [R]) and ``layers`` (int32 [K]); that of an answer is one as in a
shard (see ``feature_shards``). Nothing is pickled, and the size of a frame is checked before
anything is allocated. There is no authentication: listen where only trainers can reach.
"""

# M positions of texts, R rows of tokens, K layers

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from pipedraft.train.feature_shards import bytes_per_token, difference

HEADER = struct.Struct("<IIQ")
MAGIC = 0x50444653
HELLO, ASK, STATES, REFUSAL = range(4)
MAX_QUESTION = 1 << 24
SLACK = 1 << 16
"""Bytes of a safetensors header."""
FRAME_S = 60.0
"""How long the bytes of a frame may stop before its link counts as lost."""
ANSWER_S = 120.0
"""How long a trainer waits for states: other trainers may be served first."""
CONNECT_S = 60.0
"""How long a trainer tries to reach a server that is not there (yet, or any more)."""
ADDRESS = re.compile(r"(?P<host>[\w.-]+):(?P<port>\d+)")


# -- frames ---------------------------------------------------------------------------------


def send_frame(link: socket.socket, kind: int, payload: bytes) -> None:
    link.sendall(HEADER.pack(MAGIC, kind, len(payload)))
    link.sendall(payload)


def receive_frame(
    link: socket.socket, max_bytes: int, *, begin_s: float | None
) -> tuple[int, bytes]:
    """
    Args:
        begin_s: how long to wait for its first byte; None: for ever.

    Raises:
        ConnectionError: the link is lost, or what comes is no frame of at most ``max_bytes``.
    """
    link.settimeout(begin_s)
    header = _receive(link, 1)
    link.settimeout(FRAME_S)
    magic, kind, size = HEADER.unpack(header + _receive(link, HEADER.size - 1))
    if magic != MAGIC or size > max_bytes:
        raise ConnectionError(f"a frame starts with {magic:#x} and claims {size} bytes")
    return kind, bytes(_receive(link, size))


def _receive(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            count = link.recv_into(view[at:])
        except TimeoutError as error:
            raise ConnectionError("the other side stopped in the middle of a frame") from error
        if not count:
            raise ConnectionError("the other side closed the link")
        at += count
    return data


# -- the trainer's side ---------------------------------------------------------------------


def is_address(text: str) -> bool:
    return ADDRESS.fullmatch(text) is not None


class RemoteStates:
    """A ``Source`` that asks a server; connects again if the link is lost."""

    def __init__(self, address: str, identity: dict[str, Any], layers: Collection[int]) -> None:
        """
        Args:
            identity: of the run's target; see ``target_identity``.

        Raises:
            ValueError: nobody listens there, or another target is served.
        """
        self.address, self.identity, self.layers = address, identity, sorted(layers)
        self._turn = threading.Lock()
        self._link: socket.socket | None = None
        self._dtype = "fp32"
        with self._turn:
            self._connect(CONNECT_S)

    def _connect(self, patience_s: float) -> socket.socket:
        found = ADDRESS.fullmatch(self.address)
        assert found
        place = (found["host"], int(found["port"]))
        deadline = time.monotonic() + patience_s
        while True:
            try:
                link = socket.create_connection(place, timeout=FRAME_S)
                kind, payload = receive_frame(link, MAX_QUESTION, begin_s=FRAME_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"features: nobody serves states at {self.address} ({error}); start "
                        "python -m pipedraft.train.features serve there"
                    ) from error
                time.sleep(0.5)
        hello = json.loads(payload) if kind == HELLO else {}
        other = difference(hello, self.identity)
        if other is not None:
            link.close()
            raise ValueError(
                f"features: {self.address} serves {other}; start a server with the target of this "
                "run"
            )
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link, self._dtype = link, hello["dtype"]
        return link

    def fetch(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """
        Raises:
            ValueError: the server refuses the question, or is gone.
        """
        lengths = [len(row) for row in ids]
        question = save(
            {
                "ids": torch.tensor([token for row in ids for token in row], dtype=torch.int32),
                "lengths": torch.tensor(lengths, dtype=torch.int32),
                "layers": torch.tensor(self.layers, dtype=torch.int32),
            }
        )
        with self._turn:
            try:
                kind, payload = self._ask(self._link or self._connect(CONNECT_S), question, lengths)
            except OSError:
                self._disconnect()
                kind, payload = self._ask(self._connect(CONNECT_S), question, lengths)
        if kind == REFUSAL:
            raise ValueError(f"features: {self.address} refuses: {payload.decode()}")
        return load(payload)

    def _ask(
        self, link: socket.socket, question: bytes, lengths: Sequence[int]
    ) -> tuple[int, bytes]:
        per_token = bytes_per_token(len(self.layers), self.identity["hidden_size"], self._dtype)
        send_frame(link, ASK, question)
        return receive_frame(link, sum(lengths) * per_token + SLACK, begin_s=ANSWER_S)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
