"""Hidden states on demand: trainers query a server with the frozen target.

Requests and responses are ``Codec`` frames: typed headers and raw tensors with bounded size. There
is no authentication: listen only where no one but trainers can connect.
"""

# M tokens in all rows, R rows of tokens, K layers

import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import torch
from msgspec import Meta
from torch import Tensor

from pipedraft.inference.ranks.codec import Codec, FillBuffer, Message, check_tensor
from pipedraft.pretrained import context_length
from pipedraft.train.features.shards import DTYPES, bytes_per_token, difference, encode

if TYPE_CHECKING:
    from pipedraft.train.features.dump import States

MAX_HEADER_BYTES = 1 << 18
MAX_QUESTION_BYTES = 1 << 24
MAX_ANSWER_BYTES = 1 << 36
"""Maximum response for any target; each response is also limited by its request's size."""
FRAME_S = 60.0
"""Timeout from a frame's first byte to its last; the link then counts as lost."""
ANSWER_S = 120.0
"""How long a trainer waits for hidden states: the server may serve other trainers first."""
CONNECT_S = 60.0
"""How long a trainer retries an unreachable server."""
ADDRESS = re.compile(r"(?P<host>[\w.-]+):(?P<port>\d+)")

Name: TypeAlias = Annotated[str, Meta(max_length=64)]
Value: TypeAlias = Annotated[str, Meta(max_length=256)] | int
Address: TypeAlias = tuple[str, int]
Layer: TypeAlias = Annotated[int, Meta(ge=0, le=10_000)]


class ServedTarget(Message, tag="hello"):
    """The server's first message: its target's identity, and the storage format."""

    identity: Annotated[dict[Name, Value], Meta(max_length=16)]
    dtype: Literal["fp32", "bf16", "fp16", "int8"]


class StatesQuestion(Message, tag="question"):
    ids: Tensor
    """int32 [M]: tokens, row after row."""
    lengths: Tensor
    """int32 [R]: tokens per row."""
    layers: Annotated[list[Layer], Meta(max_length=1000)]

    def __post_init__(self) -> None:
        check_tensor("ids", self.ids, (torch.int32,), None)
        check_tensor("lengths", self.lengths, (torch.int32,), None)


class StatesAnswer(Message, tag="answer"):
    tensors: Annotated[dict[Name, Tensor], Meta(max_length=2000)]
    """Named and stored as in a shard: see ``shards``."""


class QuestionRefused(Message, tag="refusal"):
    reason: Annotated[str, Meta(max_length=1000)]


QUESTIONS: Codec[StatesQuestion] = Codec(
    StatesQuestion, max_header_bytes=MAX_HEADER_BYTES, max_tensor_bytes=MAX_QUESTION_BYTES
)
ANSWERS: Codec[ServedTarget | StatesAnswer | QuestionRefused] = Codec(
    ServedTarget | StatesAnswer | QuestionRefused,
    max_header_bytes=MAX_HEADER_BYTES,
    max_tensor_bytes=MAX_ANSWER_BYTES,
)


def filling(link: socket.socket, begin_s: float | None) -> FillBuffer:
    """Return a function that fills a buffer from a socket, with a timeout for the whole frame.

    Args:
        begin_s: timeout for the first byte; None: wait forever. The rest has ``FRAME_S``.
    """
    until_s: float | None = None

    def fill(view: memoryview) -> None:
        nonlocal until_s
        while view:
            # For the whole frame: a slow trickle of bytes would block a trainer forever.
            link.settimeout(begin_s if until_s is None else max(until_s - time.monotonic(), 1e-3))
            try:
                count = link.recv_into(view)
            except TimeoutError as error:
                part = "it came too slowly" if until_s else f"nothing came for {begin_s or 0:g} s"
                raise ConnectionError(part) from error
            if not count:
                raise ConnectionError("the other side closed the link")
            until_s, view = until_s or time.monotonic() + FRAME_S, view[count:]

    return fill


# -- the trainer's side ---------------------------------------------------------------------


class FeaturesLost(ValueError):
    """The server no longer provides the states for a run in progress; start one, then resume."""


def addresses_of(features: str) -> list[Address]:
    """Return each feature server's host and port; none for a folder.

    Raises:
        ValueError: an invalid port, or an entry that is no address.
    """
    parts = features.split(",")
    if not ADDRESS.fullmatch(parts[0]):
        return []
    places = []
    for part in parts:
        found = ADDRESS.fullmatch(part)
        if found is None:
            raise ValueError(f"features: {part!r} among addresses; give HOST:PORT,HOST:PORT")
        port = int(found["port"])
        if not 0 < port < 2**16:
            raise ValueError(f"features: {part!r}: port {port} is not in 1..65535; give another")
        places.append((found["host"], port))
    return places


class RemoteStates:
    """A ``Source`` that queries a server; if it is lost, tries the next one or reconnects."""

    def __init__(
        self,
        places: Sequence[Address],
        identity: dict[str, int | str],
        layers: Collection[int],
        *,
        first: int = 0,
    ) -> None:
        """
        Args:
            places: addresses of servers with the same target.
            identity: the run's target; see ``target_identity``.
            first: index of this process's first server (modulo their number), to spread the load.

        Raises:
            FeaturesLost: no server listens there, or it serves another target.
        """
        self.identity, self.layers = identity, sorted(layers)
        self.places = deque(places)
        """Addresses; the current server is first."""
        self.places.rotate(-first)
        self._turn = threading.Lock()
        self._link: socket.socket | None = None
        self._dtype = "fp32"
        with self._turn:
            self._connect(CONNECT_S)

    @property
    def address(self) -> str:
        host, port = self.places[0]
        return f"{host}:{port}"

    def _connect(self, patience_s: float) -> socket.socket:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                link = socket.create_connection(self.places[0], timeout=FRAME_S)
                hello = ANSWERS.read(filling(link, FRAME_S), max_tensor_bytes=0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise FeaturesLost(
                        f"features: nobody serves hidden states at {self.address} ({error}); start "
                        "python -m pipedraft.train.features serve there"
                    ) from error
                self.places.rotate(-1)
                time.sleep(0.5 / len(self.places))
            except ValueError as error:
                link.close()
                raise FeaturesLost(f"features: no server at {self.address} ({error})") from error
        other: str | None = "no target"
        if isinstance(hello, ServedTarget):
            other = difference(hello.identity, self.identity)
            self._dtype = hello.dtype
        if other is not None:
            link.close()
            raise FeaturesLost(
                f"features: {self.address} serves {other}; start a server with the target of this "
                "run"
            )
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = link
        return link

    def fetch(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Fetch the rows' hidden states from a feature server, one request after another.

        Raises:
            FeaturesLost: the server refuses the request, or is gone.
        """
        question = StatesQuestion(
            ids=torch.tensor([token for row in ids for token in row], dtype=torch.int32),
            lengths=torch.tensor([len(row) for row in ids], dtype=torch.int32),
            layers=self.layers,
        )
        tries = max(2, len(self.places))
        with self._turn:
            for number in range(1, tries + 1):
                try:
                    return self._ask(question)
                except OSError as error:
                    self._disconnect()
                    if number == tries:
                        raise FeaturesLost(
                            f"features: {self.address} was lost at the last of {tries} tries of "
                            f"one question ({error}); look why it ends, and start it again"
                        ) from error
                    self.places.rotate(-1)
        raise AssertionError("one of the tries returns or raises")

    def _ask(self, question: StatesQuestion) -> dict[str, Tensor]:
        link = self._link or self._connect(CONNECT_S)
        num_tokens, hidden_size = len(question.ids), int(self.identity["hidden_size"])
        per_token = bytes_per_token(len(self.layers), hidden_size, self._dtype)
        padding = 2 * 8 * len(self.layers)
        link.settimeout(FRAME_S)
        for buffer in QUESTIONS.encode(question).buffers:
            link.sendall(buffer)
        try:
            limit = num_tokens * per_token + padding
            answer = ANSWERS.read(filling(link, ANSWER_S), max_tensor_bytes=limit)
            if isinstance(answer, StatesAnswer):
                self._check(answer.tensors, num_tokens, hidden_size)
                return answer.tensors
        except ValueError as error:
            self._disconnect()
            raise FeaturesLost(
                f"features: {self.address} sends no hidden states ({error})"
            ) from error
        reason = answer.reason if isinstance(answer, QuestionRefused) else "it only greets"
        raise FeaturesLost(f"features: {self.address} refuses: {reason}")

    def _check(self, tensors: Mapping[str, Tensor], num_tokens: int, hidden_size: int) -> None:
        wanted = {f"layer.{layer}" for layer in self.layers}
        scales = {f"{name}.scale" for name in wanted} if self._dtype == "int8" else set()
        if tensors.keys() != wanted | scales:
            raise ValueError(f"tensors: {sorted(tensors)}; want {sorted(wanted | scales)}")
        for name in wanted:
            check_tensor(name, tensors[name], (DTYPES[self._dtype],), num_tokens, hidden_size)
        for name in scales:
            check_tensor(name, tensors[name], (torch.float32,), num_tokens)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


# -- the server's side ----------------------------------------------------------------------


class FeatureServer:
    """Answers one request at a time, from any trainer."""

    def __init__(self, states: "States", hello: ServedTarget, max_tokens: int) -> None:
        """
        Args:
            max_tokens: padded tokens per request at most.
        """
        self.states, self.hello, self.max_tokens = states, hello, max_tokens
        self.vocab_size: int = states.config.vocab_size
        self.max_positions: int = context_length(states.config)
        self._turn = threading.Lock()

    def listen(self, host: str, port: int, ready: Callable[[str, int], None]) -> None:
        """Serve until the process ends.

        Args:
            ready: called with the address, once it accepts connections.
        """
        try:
            server = socket.create_server((host, port))
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"port: {host}:{port} cannot be listened on ({error}); give another"
            ) from error
        with server:
            ready(*server.getsockname()[:2])
            while True:
                link, _ = server.accept()
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._send(link, self.hello)
                while True:
                    question = QUESTIONS.read(filling(link, None))
                    try:
                        answer: StatesAnswer | QuestionRefused = StatesAnswer(self.answer(question))
                    except ValueError as error:
                        answer = QuestionRefused(str(error)[:1000])
                    self._send(link, answer)
            except (OSError, ValueError) as error:  # this trainer is gone; others may come
                print(f"link ended: {error}", file=sys.stderr)

    def _send(
        self, link: socket.socket, message: ServedTarget | StatesAnswer | QuestionRefused
    ) -> None:
        link.settimeout(FRAME_S)
        for buffer in ANSWERS.encode(message).buffers:
            link.sendall(buffer)

    def answer(self, question: StatesQuestion) -> dict[str, Tensor]:
        """Compute the hidden states for a trainer's request.

        Raises:
            ValueError: tokens or layers that the target does not have, or too many.
        """
        ids_M, layers, lengths = question.ids, question.layers, question.lengths.tolist()
        if not lengths or min(lengths) < 1 or sum(lengths) != len(ids_M):
            raise ValueError(f"lengths: {sum(lengths)} tokens in rows, {len(ids_M)} came")
        if max(lengths) > self.max_positions or len(lengths) * max(lengths) > self.max_tokens:
            raise ValueError(
                f"batch: {len(lengths)} rows of up to {max(lengths)} tokens; this server takes "
                f"{self.max_positions} tokens in a row and {self.max_tokens} in a batch"
            )
        if int(ids_M.min()) < 0 or int(ids_M.max()) >= self.vocab_size:
            raise ValueError(f"ids: not all in [0, {self.vocab_size}), the target's vocabulary")
        if not layers or not all(1 <= layer <= self.states.num_layers for layer in layers):
            raise ValueError(f"layers: {layers} are not all in 1..{self.states.num_layers}")
        rows = [part.tolist() for part in ids_M.split(lengths)]
        stored: dict[str, Tensor] = {}
        with self._turn:
            for layer, hidden_MH in self.states.of(rows, layers).items():
                stored |= encode(hidden_MH, self.hello.dtype, layer)
        return stored
