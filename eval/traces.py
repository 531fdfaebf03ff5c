"""What was decoded so far, on disk: an evaluation goes on where it was killed, and is shared out.

    python -m pipedraft.eval ... --out OUT --shard 1/4      # a quarter of the prompts, no report
    python -m pipedraft.eval ... --out OUT                  # what is left, and the report of all

OUT/traces has one file of JSON lines for each way of decoding and shard. Its name begins with a
hash of everything that a text or its steps depend on, so that other settings never meet old lines:
they begin files of their own. Times of a turn are those of the launch that decoded it; what every
process measured (``processes`` in the results) is of the last launch alone. A turn's line is its
whole ``DecodeResult``, from which ``replay`` works out other pipelines.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipedraft
from pipedraft.eval.tasks import Prompt
from pipedraft.inference.result import DecodeResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHOLE = (0, 1)


class TraceFile:
    """A dictionary that grows line by line; a line that a kill cut short is not there."""

    def __init__(self, folder: Path, identity: dict[str, Any], shard: tuple[int, int]) -> None:
        """
        Args:
            identity: written as the first line; a digest of it is in the file's name.
            shard: (index, number); every shard's lines are read, and its own are added to.
        """
        text = json.dumps(identity, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        own = "" if shard == WHOLE else f"-{shard[0] + 1}-of-{shard[1]}"
        self.path = folder / f"{digest}{own}.jsonl"
        self._header = text
        self._found: dict[str, Any] = {}
        for path in sorted(folder.glob(f"{digest}*.jsonl")):
            self._found |= dict(read_lines(path)[1])

    def get(self, key: Sequence[Any]) -> Any:
        """The value of a key, None where there is none."""
        return self._found.get(json.dumps(key))

    def add(self, key: Sequence[Any], value: Any) -> None:
        """Flushed to disk before it returns."""
        self._found[json.dumps(key)] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with self.path.open("ab") as file:
            if is_new:
                file.write(f"{self._header}\n".encode())
            elif not _ends_line(self.path):
                file.write(b"\n")
            file.write(f"{json.dumps([key, value])}\n".encode())
            file.flush()
            os.fsync(file.fileno())


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_lines(path: Path) -> tuple[str, list[tuple[str, Any]]]:
    """The identity as it was written, and (key as JSON, value) of every whole line."""
    header, *lines = path.read_bytes().splitlines() or [b""]
    found = []
    for line in lines:
        try:
            key, value = json.loads(line)
        except ValueError:  # cut short
            continue
        found.append((json.dumps(key), value))
    return header.decode(), found


@dataclass(frozen=True)
class Traces:
    """The trace files of one evaluation."""

    folder: Path
    identity: dict[str, Any]
    """Of the target, tokenizer and everything else that all ways of decoding share."""
    shard: tuple[int, int] = WHOLE

    def open(self, **identity: Any) -> TraceFile:
        return TraceFile(self.folder, self.identity | identity, self.shard)

    def mine(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of this shard: every number-th one."""
        index, number = self.shard
        return list(prompts[index::number])


def turn_key(prompt: Prompt, turn: int, prompt_ids: Sequence[int]) -> list[Any]:
    """A turn is the same one only if its prompt has the same tokens."""
    digest = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()[:16]
    return [prompt.task, prompt.id, turn, digest]


def load_result(traces: TraceFile | None, key: Sequence[Any]) -> DecodeResult | None:
    value = None if traces is None else traces.get(key)
    return None if value is None else DecodeResult(**value)


def save_result(traces: TraceFile | None, key: Sequence[Any], result: DecodeResult) -> None:
    if traces is not None:
        traces.add(key, asdict(result))


def code_hash() -> str:
    """SHA-256 of the source files that decoding runs through."""
    digest, root = hashlib.sha256(), Path(pipedraft.__file__).parent
    for folder in ("inference", "models"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def traces_of(
    out: Path,
    target: "PreTrainedModel",
    *,
    weights: str,
    backend: str = "local",
    shard: tuple[int, int] | None = None,
) -> Traces:
    """The traces of an evaluation.

    Args:
        out: folder of its results.
        weights: of the target, as ``weights_identity`` names them.
    """
    identity = {
        "target": weights,
        "dtype": str(target.dtype),
        "device": target.device.type,
        "backend": backend,
        "versions": [version(name) for name in ("torch", "transformers")],
        "code": code_hash(),
    }
    return Traces(traces_folder(out), identity, shard or WHOLE)


def traces_folder(out: Path, *, fresh: bool = False) -> Path:
    """
    Args:
        fresh: what is in there is removed.
    """
    if fresh:
        shutil.rmtree(out / "traces", ignore_errors=True)
    return out / "traces"
