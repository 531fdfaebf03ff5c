"""Run vLLM's server for hidden states in a separate process and Python environment."""

# M tokens in all rows, H hidden

import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import httpx2
from torch import Tensor

from ...errors import make_folder
from ...eval.engine_parity import (
    VLLM,
    check_python,
    engine_environment,
    engine_failure,
)
from ...files import Values, to_json
from .online import FeaturesLost, ServedStates

CPU_CACHE_BYTES = 2**30


def states_request(
    target: str,
    layers: Sequence[int],
    *,
    dtype: Literal["float32", "bfloat16", "float16"],
    max_length: int,
    on_cpu: bool,
) -> Values:
    """Return vLLM's settings for this target.

    Args:
        layers: numbers of the hidden states. State i is the input to the target's layer i.
        max_length: tokens in the longest row.
    """
    return {
        "target": str(Path(target).resolve()) if Path(target).exists() else target,
        "layers": sorted(layers),
        "settings": {
            "dtype": dtype,
            "max-model-len": max_length + 2,
            **({"kv-cache-memory-bytes": CPU_CACHE_BYTES, "max-num-seqs": 16} if on_cpu else {}),
        },
    }


def server_command(python: Path, request: Values, folder: Path) -> list[str | Path]:
    """Return the command to run vLLM's server for ``ServedStates``.

    Args:
        request: see ``states_request``.
        folder: for the files with hidden states.
    """
    check_python(python)
    make_folder("out", folder)
    place = folder / "request.json"
    place.write_bytes(to_json(request))
    return [python, VLLM.script, "serve", place, folder.resolve()]


def serve(python: Path, request: Values, folder: Path, *, host: str, port: int) -> int:
    """Run vLLM's server until it ends, and return its exit status."""
    request["settings"] |= {"host": host, "port": port}
    command = server_command(python, request, folder)
    return subprocess.run(command, env=engine_environment(python), check=False).returncode


class VllmStates:
    """Private vLLM server that runs the frozen target on rows of token ids."""

    def __init__(self, python: Path, request: Values, hidden_size: int) -> None:
        self._place = tempfile.TemporaryDirectory()
        folder = Path(self._place.name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        request["settings"] |= {"host": "127.0.0.1", "port": port}
        # A file: nobody reads while vLLM works, and a full pipe would stop it.
        self._said = (folder / "said.txt").open("w+")
        self._process = subprocess.Popen(
            server_command(python, request | {"ends_with_stdin": True}, folder),
            env=engine_environment(python),
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            text=True,
        )
        address = f"http://127.0.0.1:{port}"
        self._source = ServedStates([address], request["layers"], hidden_size)
        while True:
            try:
                httpx2.get(f"{address}/v1/models")
                return
            except httpx2.TransportError:
                self._check()
                time.sleep(0.1)

    def _check(self) -> None:
        if (status := self._process.poll()) is not None:
            self._said.seek(0)
            raise engine_failure(self._said.read(), status)

    def close(self) -> None:
        self._process.communicate()  # close stdin; a process that has died is no error here
        self._said.close()
        self._place.cleanup()

    def of(self, ids: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Tensor]:
        """Return hidden states {layer: [M, H]}, concatenated over rows.

        Raises:
            Failure: vLLM ended.
            FeaturesLost: vLLM refuses a row, or wrote states for other tokens.
        """
        try:
            states = self._source.fetch([], ids)
        except FeaturesLost:
            self._check()
            raise
        return {layer: states[f"layer.{layer}"] for layer in layers}
