"""Get each batch's hidden states from vLLM servers while training.

A server answers a completion request with the path of a safetensors file, written by vLLM's
``ExampleHiddenStatesConnector``. The file contains ``hidden_states`` [tokens, layers, H] and
``token_ids``. The server holds a lock on PATH.lock until the file is complete. Trainers and servers
therefore share a file system.
"""

# M tokens in all rows, K layers, H hidden

import fcntl
import json
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...data_recipes.chat_client import is_address
from ...files import Values

PATIENCE_S = 60.0
"""Seconds for which a trainer retries an unreachable or failing server."""
ANSWER_S = 120.0
"""Timeout for one row, its file included."""
CONCURRENCY = 64
"""Requests at a time: vLLM batches them."""
MAX_REPLY_BYTES = 1 << 20


class FeaturesLost(ValueError):
    """Raised when no server can provide hidden states. Start one, then resume the run."""


class _Unavailable(Exception):
    """Temporary fault, or a fault that another server may not have."""


def addresses_of(features: str) -> list[str]:
    """Return the servers' addresses without /v1, or an empty list if ``features`` is a folder."""
    parts = [part.strip().rstrip("/").removesuffix("/v1") for part in features.split(",")]
    if not parts[0].startswith(("http://", "https://")):
        return []
    for part in parts:
        if not is_address(part):
            raise ValueError(f"features: {part!r} is no address; give http://HOST:PORT,http://...")
    return parts


class ServedStates:
    """Client for hidden states from vLLM servers. If one server fails, it asks the next one."""

    def __init__(
        self, addresses: Sequence[str], layers: Collection[int], hidden_size: int, *, first: int = 0
    ) -> None:
        """
        Args:
            addresses: servers with the same target and layers.
            layers: layers in the servers' files, which have them in ascending order.
            first: index of the server to ask first, modulo the number of servers. Processes give
                different indices to spread the load.
        """
        self.layers, self.hidden_size = sorted(layers), hidden_size
        self.addresses = deque(addresses)
        """Servers; the first one is asked next."""
        self.addresses.rotate(-first)
        self._models: dict[str, str] = {}
        limits = httpx2.Limits(max_connections=CONCURRENCY)
        # Uncompressed: a small chunk could otherwise unpack far past MAX_REPLY_BYTES.
        self._client = httpx2.Client(
            timeout=ANSWER_S, limits=limits, headers={"Accept-Encoding": "identity"}
        )
        self._pool = ThreadPoolExecutor(CONCURRENCY)

    def fetch(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return hidden states ``layer.I`` [M, H], concatenated over rows.

        Args:
            rows: indices in the data set (not used).
            ids: token ids for these rows.

        Raises:
            FeaturesLost: a server refuses a row, or no server works any more.
        """
        states_MKH = torch.cat([states for states, _ in self.ask(ids)])
        return {f"layer.{layer}": states_MKH[:, k] for k, layer in enumerate(self.layers)}

    def ask(self, ids: Sequence[Sequence[int]]) -> list[tuple[Tensor, int]]:
        """Return each row's states [tokens, K, H] and the server's next token."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return list(self._pool.map(self._row, ids))
            except (httpx2.TransportError, _Unavailable) as error:
                if time.monotonic() > until_s:
                    raise FeaturesLost(
                        f"features: {self.addresses[0]} sends no hidden states ({error}); start "
                        "'pipedraft train features serve' there"
                    ) from error
                self.addresses.rotate(-1)
                time.sleep(0.5 / len(self.addresses))

    def _row(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        address = self.addresses[0]
        try:
            if address not in self._models:
                listing = self._send("GET", f"{address}/v1/models")
                self._models[address] = listing["data"][0]["id"]
            question = {
                "model": self._models[address],
                "prompt": list(ids),
                # The minimum for a completion.
                "max_tokens": 1,
                "temperature": 0.0,
                "return_token_ids": True,
            }
            reply = self._send("POST", f"{address}/v1/completions", question)
            path = Path(reply["kv_transfer_params"]["hidden_states_path"])
            token = reply["choices"][0]["token_ids"][0]
            if type(token) is not int:
                raise TypeError("no token id")
        except (LookupError, TypeError) as error:
            raise FeaturesLost(
                f"features: {address} answers without hidden states; start it with "
                "pipedraft train features serve"
            ) from error
        return self._read(path, ids), token

    def _send(self, method: str, url: str, question: Values | None = None) -> Any:
        with self._client.stream(method, url, json=question) as response:
            body = bytearray()
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_REPLY_BYTES:
                    raise FeaturesLost(f"features: {url} answers with more than a megabyte")
        said = " ".join(body[:300].decode("utf-8", "replace").split())
        # These faults may pass, or another server may not have them; other refusals are final.
        if response.status_code >= 500 or response.status_code in (408, 429):
            raise _Unavailable(f"HTTP {response.status_code}: {said}")
        if response.status_code != 200:
            raise FeaturesLost(f"features: {url} refuses: HTTP {response.status_code}: {said}")
        try:
            return json.loads(body)
        except ValueError as error:
            raise FeaturesLost(f"features: {url} is no server of this kind: {said}") from error

    def _read(self, path: Path, ids: Sequence[int]) -> Tensor:
        """Wait for the file's lock, return a row's states [tokens, K, H], and remove the file."""
        until_s = time.monotonic() + ANSWER_S
        lock = Path(f"{path}.lock")
        try:
            with lock.open() as held:
                while True:
                    try:
                        # Polled, because a blocking flock has no timeout.
                        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    except BlockingIOError as error:
                        if time.monotonic() > until_s:
                            raise _Unavailable(f"{path}: not complete in time") from error
                        time.sleep(0.002)
            # Twice the size in float32 at most: a wrong file must not fill the memory.
            if path.stat().st_size > 2 * 4 * (len(ids) + 1) * len(self.layers) * self.hidden_size:
                raise FeaturesLost(f"features: {path} is larger than this row's states")
            found = load_file(path)
            states, tokens = found["hidden_states"], found["token_ids"].tolist()
        except (OSError, SafetensorError, KeyError) as error:
            raise FeaturesLost(
                f"features: {path} cannot be read ({error!r}); a trainer needs the server's "
                "folder under the same path"
            ) from error
        shape = (len(self.layers), self.hidden_size)
        # The file may go on with the server's generated token.
        if tokens[: len(ids)] != list(ids) or states.shape[1:] != shape:
            raise FeaturesLost(
                f"features: {path} has states {list(states.shape)}; want {shape[0]} layers of "
                f"{shape[1]} for the row's {len(ids)} tokens; serve this configuration's target"
            )
        for file in (path, lock):
            file.unlink(missing_ok=True)
        return states[: len(ids)]
