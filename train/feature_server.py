"""Hidden states on demand, the server's side: the frozen target, asked by trainers.

The messages are those of ``feature_link``.
"""

# M positions of texts, R rows of tokens

import json
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pipedraft.train.feature_dump import States
from pipedraft.train.feature_link import (
    FRAME_S,
    HELLO,
    MAX_QUESTION,
    REFUSAL,
    STATES,
    receive_frame,
    send_frame,
)
from pipedraft.train.feature_shards import encode


class FeatureServer:
    """Answers one question after another, whichever trainer asks."""

    def __init__(
        self,
        states: States,
        hello: dict[str, Any],
        *,
        dtype: str,
        vocab_size: int,
        max_tokens: int,
        max_positions: int,
    ) -> None:
        """
        Args:
            hello: identity of the target, and the dtype of the states.
            max_tokens: padded tokens of one question.
        """
        self.states, self.hello, self.dtype = states, hello, dtype
        self.vocab_size, self.max_tokens = vocab_size, max_tokens
        self.max_positions = max_positions
        self._turn = threading.Lock()

    def listen(self, host: str, port: int, ready: Callable[[str, int], None]) -> None:
        """Serve until the process ends.

        Args:
            ready: called with the address, once it can be connected to.
        """
        try:
            server = socket.create_server((host, port))
        except OSError as error:
            raise ValueError(
                f"port: {host}:{port} cannot be listened on ({error.strerror}); give another"
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
                send_frame(link, HELLO, json.dumps(self.hello).encode())
                while True:
                    _, question = receive_frame(link, MAX_QUESTION, begin_s=None)
                    try:
                        kind, answer = STATES, self.answer(question)
                    except (ValueError, KeyError, SafetensorError) as error:
                        kind, answer = REFUSAL, str(error).encode()
                    link.settimeout(FRAME_S)
                    send_frame(link, kind, answer)
            except OSError as error:  # this trainer is gone; others may come
                print(f"link ended: {error}", file=sys.stderr)

    def answer(self, question: bytes) -> bytes:
        """
        Raises:
            ValueError: tokens or layers that the target does not have, or too many.
        """
        tensors = load(question)
        ids_M, lengths_R, layers = tensors["ids"], tensors["lengths"], tensors["layers"].tolist()
        lengths = lengths_R.tolist()
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
                stored |= encode(hidden_MH, self.dtype, layer)
        return save({name: tensor.cpu().contiguous() for name, tensor in stored.items()})
