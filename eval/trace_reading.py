"""Recorded runs read back from trace files: `OUT/traces` as traces.py writes it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipedraft.errors import UsageError
from pipedraft.eval.metrics import AUTOREGRESSIVE
from pipedraft.eval.traces import read_lines
from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.result import DecodeResult

Key = tuple[str, str, int]
"""Benchmark, id of the prompt, turn."""


@dataclass(frozen=True)
class Recording:
    """One way of decoding, on all shards of its evaluation."""

    config: DecodeConfig
    draft_type: str | None
    """None: plain decoding."""
    draft_hash: str
    relative_cost: float
    """Of a draft forward, by its size, in target passes of one token."""
    boundaries: tuple[int, ...]
    turns: dict[Key, DecodeResult]

    @property
    def name(self) -> str:
        """For messages and tables."""
        if self.draft_type is None:
            return AUTOREGRESSIVE
        schedule = self.config.schedule
        shape = schedule.label or f"W={schedule.width}"
        return f"{self.draft_type} {self.draft_hash[:6]}: {schedule.name} {shape}"

    def label(self) -> dict[str, Any]:
        config = self.config
        return {
            "method": self.name,
            "draft_type": self.draft_type,
            "draft_sha256": self.draft_hash,
            "schedule": config.schedule.name,
            "tree_width": config.schedule.width,
            "tree": config.schedule.label,
            "temperature": config.temperature,
            "seed": config.seed,
            "recorded_stages": config.num_stages,
        }

    def with_draft(self, cost: CostModel) -> CostModel:
        """The cost model with a draft's cost where it leaves that to the draft's size."""
        return (
            cost
            if cost.draft_forward is not None
            else replace(cost, draft_forward=self.relative_cost)
        )

    def clock(self, cost: CostModel) -> VirtualClock:
        """A fresh one of the recorded pipeline."""
        return VirtualClock(cost, self.boundaries, cost.draft_forward or 0.0)


def recorded_draft(draft: Any, target: Any) -> dict[str, Any]:
    """What the header of a trace file says for ``Recording``.

    Args:
        draft: None for plain decoding.
        target: the ``StagedTarget`` that it runs with.
    """
    return {
        "draft_type": None if draft is None else draft.draft_type,
        "relative_cost": 0.0 if draft is None else draft.relative_cost(target),
        "boundaries": list(target.boundaries),
    }


def read_recordings(places: Iterable[Path]) -> list[Recording]:
    """
    Args:
        places: folders of evaluations, their folders "traces", or files in these.
    """
    headers: dict[str, dict[str, Any]] = {}
    turns: dict[str, dict[Key, DecodeResult]] = {}
    for path in dict.fromkeys(path for place in places for path in _files(place)):
        text, lines = read_lines(path)
        try:
            header = json.loads(text)
        except ValueError as error:
            raise UsageError(
                f"TRACES: {str(path)!r} is no trace file ({error}); give the --out folder of an "
                "evaluation"
            ) from error
        if "config" not in header or header.get("repeat"):
            continue  # texts of the reference, or the same steps at other times
        if "recorded" not in header:
            raise UsageError(
                f"TRACES: {str(path)!r} was written before steps were recorded; run the evaluation "
                "again"
            )
        headers[text] = header
        for key, value in lines:
            benchmark, name, turn, _ = json.loads(key)
            turns.setdefault(text, {})[benchmark, name, turn] = DecodeResult(**value)
    if not turns:
        raise UsageError(
            f"TRACES: {', '.join(map(str, places))}: no decoded turn; give the --out folder of an "
            "evaluation"
        )
    return [_recording(headers[text], found) for text, found in turns.items()]


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


def _recording(header: dict[str, Any], turns: dict[Key, DecodeResult]) -> Recording:
    recorded = header["recorded"]
    return Recording(
        config=DecodeConfig.from_dict(header["config"]),
        draft_type=recorded["draft_type"],
        draft_hash=(header["draft"] or "").rpartition(" ")[2],
        relative_cost=recorded["relative_cost"],
        boundaries=tuple(recorded["boundaries"]),
        turns=turns,
    )
