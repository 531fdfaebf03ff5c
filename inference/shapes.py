"""Shapes of draft trees and of micro-batches, and how a travelling tree is cut and extended."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

EAGLE1_PATHS: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""Ranks from the root: EAGLE-1's published tree of 25 guesses for 7B chat models."""


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """What one round of drafting proposes below the root."""

    kind: Literal["chain", "static", "dynamic"] = "dynamic"
    """dynamic: EAGLE-2's, the best ``num_tokens`` of all candidates by cumulative score.
    static: the ranks in ``paths``, whatever the scores. chain: one guess per level."""
    depth: int = 7
    """Levels of guesses (forward passes of the draft). EAGLE's code counts the expansions after
    the first level: its depth 6 is 7 here."""
    top_k: int = 10
    """Beams of a dynamic tree, and children of each."""
    num_tokens: int = 59
    """Guesses of a dynamic tree, the root not counted."""
    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS
    """Ranks from the root of every guess of a static tree; parents of all must be there."""

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "num_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"tree.{name}: {getattr(self, name)} is below 1; give at least 1")
        orphans = [p for p in self.paths if len(p) > 1 and p[:-1] not in self.paths]
        if orphans:
            raise ValueError(
                f"tree.paths: {list(orphans[0])} has no parent {list(orphans[0][:-1])}; add it"
            )

    @property
    def is_chain(self) -> bool:
        return self.kind == "chain"

    @property
    def width(self) -> int:
        """Children of the root."""
        if self.kind == "static":
            return sum(1 for path in self.paths if len(path) == 1)
        return 1 if self.is_chain else self.top_k

    @property
    def label(self) -> str:
        """As ``parse`` reads it."""
        if self.kind == "static":
            return "static"
        sizes = [self.depth] if self.is_chain else [self.depth, self.top_k, self.num_tokens]
        return ":".join([self.kind, *map(str, sizes)])

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """``chain:M``, ``static``, or ``dynamic[:DEPTH:TOP_K:TOKENS]``.

        Raises:
            ValueError: none of these.
        """
        kind, *sizes = text.split(":")
        names = {"chain": ["depth"], "static": [], "dynamic": ["depth", "top_k", "num_tokens"]}
        expected = names.get(kind)
        right_count = expected is not None and len(sizes) in {len(expected), 0}
        if not right_count or not all(size.isdecimal() for size in sizes):
            raise ValueError(
                f"tree: {text!r} is no tree; give chain:7, static, or dynamic:7:10:59 (levels, "
                "beams, draft tokens)"
            )
        assert expected is not None
        fields = dict(zip(expected, map(int, sizes), strict=False))
        return cls(kind=kind, **fields)  # type: ignore[arg-type]  # a key of names


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """How FlowSpec extends a tree that is on its way."""

    enabled: bool = True
    """Off: no new guesses inside a round, which is pruned pipeline parallelism."""
    by_score: bool = True
    """Send the best guesses first; off: level by level."""
    depth: int | None = None
    """Draft forwards beside a step; None: as many as fit beside it under the cost model, at least
    one and at most those of a whole tree."""
    step_tokens: int = 32
    """Guesses that one draft forward continues, and that it adds."""
    tree_first: bool = False
    """As published: the stages wait after a miss until a whole tree is drafted, which then enters
    with the root, and a fresh tree of ``depth`` levels from the root follows each commit. Off: the
    root enters at once, and the tree on its way is continued beside every step."""
    num_tokens: int = 64
    """Guesses of a fresh tree, those already on their way included."""
    refill_depth: int = 2
    """Levels added to the last tree when the returning segment was pruned to nothing; 0: none."""
    refill_tokens: int = 48
    """The best new guesses of these levels that are sent."""

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"expansion.depth: {self.depth} is below 1; leave it out or give 1")
        if self.step_tokens < 1:
            raise ValueError(
                f"expansion.step_tokens: {self.step_tokens} is below 1; give 1 or more"
            )
        for name in ("num_tokens", "refill_depth", "refill_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"expansion.{name}: {getattr(self, name)} is negative; give 0")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What PipeInfer drafts in one step, and how sure the draft has to be.

    The defaults never stop drafting: on the lock-step clock a guess in an entry that would stay
    empty costs nothing. PipeInfer's code has size 16, accept 0.5 and split 0.1 as defaults, and its
    published runs size 3 or 4, branches 3, accept 0.001 to 0.1, split 0.8 to 0.9, recovery up to
    0.4 and decay up to 0.01.
    """

    size: int = 3
    """Guesses, over all branches; they enter the first stage together. Fewer where the cost model
    says that further rows take more time than they are right often enough to save."""
    branches: int = 1
    """Paths that one micro-batch may begin; 1: a chain."""
    accept: float = 0.0
    """A branch ends where the probability of the draft's best token is below this."""
    split: float = 0.1
    """A branch forks into the draft's next best tokens where their probability is above this."""
    recovery: float = 0.0
    """Added to both thresholds for each micro-batch since the last verdict."""
    decay: float = 0.0
    """Taken off both for each micro-batch since the last verdict that came out empty."""
    give_up: float = 0.1
    """While a smaller part of the latest guesses was right, the draft pauses, twice as long every
    time: one that is of no use then costs the stages little. 0: never."""
    restart: bool = False
    """As published: draft from the root again after every verdict, and verify it on its own."""
    max_in_flight: int | None = None
    """Nothing is drafted while the tree has this many rows; None: no limit."""

    def __post_init__(self) -> None:
        for name in ("size", "branches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"micro_batch.{name}: {getattr(self, name)} is below 1; give at least 1"
                )
        for name in ("accept", "split", "give_up"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"micro_batch.{name}: {getattr(self, name)} is no probability; give 0 to 1"
                )
        for name in ("recovery", "decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"micro_batch.{name}: {getattr(self, name)} is not 0 or more; give 0 for none"
                )
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(
                f"micro_batch.max_in_flight: {self.max_in_flight} is below 1; leave it out or "
                "give at least 1"
            )

    @property
    def label(self) -> str:
        """For tables."""
        return f"micro-batch:{self.size}" + (":restart" if self.restart else "")


def segment_sizes(num_rows: int, num_segments: int, max_rows: int) -> list[int]:
    """Rows of each segment that a tree is cut into: nearly equal, the longer ones last, none empty.

    Args:
        num_segments: 1 is never cut; else there are more where one would exceed ``max_rows``.
    """
    if num_segments > 1:
        num_segments = max(num_segments, math.ceil(num_rows / max_rows))
    cuts = [num_rows * part // num_segments for part in range(num_segments + 1)]
    return [stop - start for start, stop in pairwise(cuts) if start < stop]
