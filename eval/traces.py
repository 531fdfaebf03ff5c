"""Store decoded turns, so that an evaluation can be sharded, and can resume after a kill.

    python -m pipedraft.eval ... --out OUT --shard 1/4      # a quarter of the prompts, no report
    python -m pipedraft.eval ... --out OUT                  # the rest, and the report for all

OUT/traces has one JSON lines file per decoding method and shard. The file's name begins with a hash
of everything that outputs and steps depend on, so other settings start new files. A turn's times
come from the launch that decoded it. Process measurements (``processes`` in the results) come only
from the last launch. A line stores a turn's whole ``DecodeResult``, so ``replay`` can compute
times on other hardware.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import UsageError
from ..files import Values
from ..inference.config import DecodeConfig
from ..inference.cost_model import CostModel
from ..inference.result import DecodeResult
from .metrics import AUTOREGRESSIVE
from .tasks import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
WHOLE = (0, 1)
TurnKey = tuple[str, str, int]
"""Benchmark, prompt id, turn."""


class TraceFile:
    """File with JSON values by key. Each new value adds a line.

    A line cut short by a kill is ignored.
    """

    def __init__(
        self,
        folder: Path | None = None,
        identity: Values | None = None,
        shard: tuple[int, int] = WHOLE,
    ) -> None:
        """
        Args:
            folder: folder for the files. None keeps everything in memory.
            identity: the first line's content. The file's name contains its digest.
            shard: (index, number). Read lines from every shard, and write new lines to this one.
        """
        self.path: Path | None = None
        self._found: Values = {}
        if folder is not None:
            self._header = json.dumps(identity, sort_keys=True, default=str)
            digest = hashlib.sha256(self._header.encode()).hexdigest()[:16]
            own = "" if shard == WHOLE else f"-{shard[0] + 1}-of-{shard[1]}"
            self.path = folder / f"{digest}{own}.jsonl"
            for path in sorted(folder.glob(f"{digest}*.jsonl")):
                turns = dict(read_lines(path)[1])
                if "-of-" in path.name:  # decoded next to other processes: no usable times
                    turns = {key: _untimed(value) for key, value in turns.items()}
                self._found |= turns

    def get(self, key: Sequence[object]) -> Values | None:
        """Return a key's value, or None if it is missing."""
        return self._found.get(json.dumps(key))

    def find(self, key: Sequence[object], compute: Callable[[], T]) -> T:
        """Return a key's value. If it is missing, call ``compute`` and store the result."""
        name = json.dumps(key)
        if name not in self._found:
            self._found[name] = compute()
            if self.path is not None:
                self._write(self.path, json.dumps([key, self._found[name]]))
        return self._found[name]

    def _write(self, path: Path, line: str) -> None:
        """Append a line, and flush it to disk before returning."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if not size:
                file.write(f"{self._header}\n".encode())
            elif file.read() != b"\n":
                file.write(b"\n")
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())


def _untimed(value: object) -> object:
    """Clear a decoded turn's times, and leave other values unchanged."""
    if isinstance(value, dict) and "token_times_s" in value:
        return value | {"token_times_s": []}
    return value


def read_lines(path: Path) -> tuple[str, list[tuple[str, object]]]:
    """Return the first line (the identity), and (key as JSON, value) for every whole line."""
    header, *lines = path.read_bytes().splitlines() or [b""]
    found = []
    for line in lines:
        try:
            key, value = json.loads(line)
        except (ValueError, TypeError, RecursionError):  # cut short
            continue
        found.append((json.dumps(key), value))
    return header.decode(), found


@dataclass(frozen=True)
class Traces:
    """One evaluation's trace files."""

    folder: Path | None = None
    """Folder for the trace files; None: nothing is stored on disk."""
    identity: Values | None = None
    """Target, tokenizer and everything else shared by all methods."""
    shard: tuple[int, int] = WHOLE

    def open(self, **identity: object) -> TraceFile:
        return TraceFile(self.folder, (self.identity or {}) | identity, self.shard)

    def mine(self, benchmarks: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Prompt]]:
        """Return this shard's prompts by benchmark, without empty benchmarks.

        Each of ``number`` shards gets every ``number``-th prompt.
        """
        index, number = self.shard
        pairs = [(name, prompt) for name, prompts in benchmarks.items() for prompt in prompts]
        kept: dict[str, list[Prompt]] = {}
        for name, prompt in pairs[index::number]:
            kept.setdefault(name, []).append(prompt)
        return kept


def turn_key(prompt: Prompt, turn: int, prompt_ids: Sequence[int]) -> list[object]:
    """Return a decoded turn's key, with a hash of the prompt's tokens."""
    digest = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()[:16]
    return [prompt.task, prompt.id, turn, digest]


def code_hash(root: Path = Path(__file__).parents[1]) -> str:
    """Return SHA-256 over the source files used in decoding, in the package's folder ``root``."""
    digest = hashlib.sha256()
    for folder in ("inference", "models"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def traces_of(
    out: Path | None,
    target: "PreTrainedModel",
    *,
    weights: str,
    dtype: object,
    backend: str = "local",
    shard: str | None = None,
) -> Traces:
    """Open an evaluation's traces.

    Args:
        out: results folder. None keeps turns in memory.
        weights: the target's weights, as named by ``weights_identity``.
        dtype: the target's dtype, from ``dtype_of``.
        shard: "2/4" is the second of four.
    """
    index, _, number = (shard or "1/1").partition("/")
    identity = {
        "target": weights,
        "dtype": str(dtype),
        "device": target.device.type,
        "backend": backend,
        "versions": [version(name) for name in ("torch", "transformers")],
        "code": code_hash(),
    }
    folder = None if out is None else out / "traces"
    return Traces(folder, identity, (int(index) - 1, int(number)))


def remove_traces(out: Path, shard: str | None = None) -> None:
    """Delete the stored turns. If ``shard`` is given, keep the other shards of this division.

    Files from unsharded runs and other divisions are deleted too, because they may contain turns
    from any shard.
    """
    if shard is None:
        shutil.rmtree(out / "traces", ignore_errors=True)
        return
    index, number = map(int, shard.split("/"))
    own, division = f"-{index}-of-{number}.jsonl", f"-of-{number}.jsonl"
    for path in (out / "traces").glob("*.jsonl"):
        if path.name.endswith(own) or not path.name.endswith(division):
            path.unlink(missing_ok=True)


# -- recorded runs, read back for replay -----------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """One method's decoded turns from all shards of an evaluation."""

    config: DecodeConfig
    draft_type: str | None
    """Draft type; None: autoregressive decoding."""
    draft_hash: str
    relative_cost: float
    """Cost of a draft forward, by its size, in one-token target passes."""
    boundaries: tuple[int, ...]
    turns: dict[TurnKey, DecodeResult]

    @property
    def name(self) -> str:
        """Return the name for messages and tables."""
        if self.draft_type is None:
            return AUTOREGRESSIVE
        schedule = self.config.schedule
        shape = schedule.label or f"W={schedule.width}"
        return f"{self.draft_type} {self.draft_hash[:6]}: {schedule.name} {shape}"

    def with_draft(self, cost: CostModel) -> CostModel:
        """Return the cost model. If it has no draft cost, derive one from the draft's size."""
        if cost.draft_forward is not None:
            return cost
        return replace(cost, draft_forward=self.relative_cost)


class _Recorded(msgspec.Struct):
    draft_type: str | None
    relative_cost: float
    boundaries: tuple[int, ...]


class _Header(msgspec.Struct):
    """Fields read from a trace file's first line."""

    config: Values | None = None
    repeat: int = 0
    recorded: _Recorded | None = None
    draft: str | None = None


def read_recordings(places: Iterable[Path]) -> list[Recording]:
    """Read evaluation traces. They store each run's decoding step by step.

    Args:
        places: evaluation folders, their "traces" folders, or trace files.
    """
    found: dict[str, Recording] = {}
    for path in dict.fromkeys(path for place in places for path in _files(place)):
        try:
            text, lines = read_lines(path)
            header = msgspec.json.decode(text, type=_Header)
            if header.config is None or header.recorded is None or header.repeat:
                continue  # reference outputs, or the same steps at other times
            # Decoding turns together changes no counts, so it makes no second recording.
            identity = json.loads(text)
            identity.pop("together", None)
            recording = Recording(
                config=DecodeConfig.from_dict(header.config),
                draft_type=header.recorded.draft_type,
                draft_hash=(header.draft or "").rpartition(" ")[2],
                relative_cost=header.recorded.relative_cost,
                boundaries=header.recorded.boundaries,
                turns={},
            )
            turns = found.setdefault(json.dumps(identity), recording).turns
            for key, value in lines:
                benchmark, name, turn, _ = json.loads(key)
                turns[benchmark, name, turn] = msgspec.convert(value, DecodeResult)
        except UsageError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(
                f"TRACES: {str(path)!r} is no trace file ({error}); give the --out folder of an "
                "evaluation"
            ) from error
    recordings = [recording for recording in found.values() if recording.turns]
    if not recordings:
        raise UsageError(
            f"TRACES: {', '.join(map(str, places))}: no decoded turn; give the --out folder of an "
            "evaluation"
        )
    return recordings


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    folder = place / "traces" if (place / "traces").is_dir() else place
    found = sorted(folder.glob("*.jsonl"))
    if not found:
        raise UsageError(
            f"TRACES: {str(place)!r} holds no traces; give the --out folder of an evaluation"
        )
    return found
