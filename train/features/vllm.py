"""Get hidden states from a target in vLLM, through vLLM's own hidden-states connector.

vLLM runs in a process with its own environment. For each row it writes a safetensors file with
``hidden_states`` [tokens, layers, H] and ``token_ids``, as the speculators package reads them.
"""

# M tokens in all rows, H hidden

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipedraft.cli import Failure, make_folder
from pipedraft.eval.engine_parity import (
    SCRIPT,
    check_python,
    engine_environment,
    engine_failure,
)
from pipedraft.files import Values, to_json

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
        layers: layer i is the input of the target's layer i.
        max_length: tokens in the longest row.
    """
    settings = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "max_num_seqs": 16} if on_cpu else {}
    return {
        "target": str(Path(target).resolve()) if Path(target).exists() else target,
        "dtype": dtype,
        "layers": sorted(layers),
        "max_model_len": max_length + 2,
        "settings": settings,
    }


def serve(python: Path, request: Values, folder: Path, *, host: str, port: int) -> int:
    """Run vLLM's server for ``ServedStates`` until it ends; return its exit status.

    Args:
        folder: for the files with hidden states.
    """
    check_python(python)
    make_folder("out", folder)
    place = folder / "request.json"
    place.write_bytes(to_json(request | {"host": host, "port": port}))
    command: list[str | Path] = [python, SCRIPT, "serve", place, folder.resolve()]
    return subprocess.run(command, env=engine_environment(python), check=False).returncode


class VllmStates:
    """Process that runs the frozen target in vLLM on token rows."""

    def __init__(self, python: Path, request: Values) -> None:
        """
        Args:
            request: see ``states_request``.
        """
        check_python(python)
        self.layers: list[int] = request["layers"]
        self._place = tempfile.TemporaryDirectory()
        folder = Path(self._place.name)
        place = folder / "request.json"
        place.write_bytes(to_json(request))
        # A file, because nobody reads while vLLM works: a full pipe would stop it.
        self._said = (folder / "said.txt").open("w+")
        self._process = subprocess.Popen(
            [python, SCRIPT, "states", place, folder / "rows"],
            env=engine_environment(python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def close(self) -> None:
        self._process.communicate()  # close stdin; a process that has died is no error here
        self._said.close()
        self._place.cleanup()

    def of(self, ids: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Tensor]:
        """Return hidden states {layer: [M, H]}, row after row.

        Raises:
            Failure: vLLM ended, or wrote states for other tokens.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            print(json.dumps([list(row) for row in ids]), file=stdin, flush=True)
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._said.seek(0)
            raise engine_failure(self._said.read(), self._process.wait())
        found: list[Tensor] = []
        for path, row in zip(json.loads(line), ids, strict=True):
            held = load_file(path)
            if held["token_ids"].tolist() != list(row):
                raise Failure(f"vllm: {path} holds the states of other tokens")
            found.append(held["hidden_states"][: len(row)])
            # Kept, a data set's files would need room for all states at once.
            for file in (Path(path), Path(f"{path}.lock")):
                file.unlink(missing_ok=True)
        states = torch.cat(found)
        return {layer: states[:, self.layers.index(layer)] for layer in layers}
