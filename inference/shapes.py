"""Shapes of draft trees, how many draft tokens pay, and how a tree is cut into segments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from pipedraft.files import Values

Budget: TypeAlias = int | Literal["auto"]
"""Draft tokens; auto: as many as pay under the cost model, by the draft's own probabilities."""
MOST_ROWS = 16
"""Of a segment with an automatic budget: FlowSpec's L_max."""
LONGEST = 3.0
"""Price of a row that enters at a step over its price in segments of equal lengths: they differ,
and the longest one under way sets the time of a step (docs/log.md)."""
SHARPNESS = 3.0
"""Power to which the draft's probabilities are raised before they are weighed: its best tokens are
right more often, and the others less often, than it says (docs/log.md)."""


@dataclass(frozen=True, kw_only=True)
class RowCosts:
    """What draft tokens are weighed against."""

    tokens: float
    """Emitted without them."""
    time: float
    """In this time."""
    row: float
    """Time that each of them adds."""
    later: float = 1.0
    """Price of a row that a further draft forward of the step makes, over that of the first one's:
    it could come with the next step as well."""
    sharpness: float = SHARPNESS
    """See there; more where the draft's best tokens are right more often than it says."""


def rows_that_pay(scores: Sequence[float], costs: RowCosts) -> int:
    """How many of the best rows make the most tokens per time.

    A row is emitted if its whole path is: with the probability p that its cumulative score says.
    The k best rows make (tokens + p_1 + .. + p_k) tokens in (time + k row); as p falls, the maximum
    is before the first one with p / row below the rate that the rows before it have made.

    Args:
        scores: cumulative log-probabilities, descending.
    """
    tokens, time = costs.tokens, costs.time
    for count, score in enumerate(scores):
        probability = math.exp(score)
        if probability * time <= costs.row * tokens:
            return count
        tokens, time = tokens + probability, time + costs.row
    return len(scores)


EAGLE1_PATHS: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""Ranks from the root: EAGLE-1's published tree of 25 draft tokens for 7B chat models."""


MAX_SIZE = 1024
"""Levels, beams or draft tokens of a tree."""


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """What one round of drafting proposes below the root."""

    kind: Literal["chain", "static", "dynamic"] = "dynamic"
    """dynamic: EAGLE-2's, the best ``num_tokens`` of all candidates by cumulative score.
    static: the ranks in ``paths``, whatever the scores. chain: one draft token per level."""
    depth: int = 7
    """Levels of draft tokens (forward passes of the draft). EAGLE's code counts the expansions
    after the first level: its depth 6 is 7 here."""
    top_k: int = 10
    """Beams of a dynamic tree, and children of each."""
    num_tokens: Budget = 59
    """Draft tokens of a dynamic tree, the root not counted; auto: at most 59."""
    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS
    """Ranks from the root of every draft token of a static tree; parents of all must be there."""

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "num_tokens"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise ValueError(f"tree.{name}: {value} is below 1; give at least 1")
            if value != "auto" and value > MAX_SIZE:
                raise ValueError(f"tree.{name}: {value}; give at most {MAX_SIZE}")
        orphans = [p for p in self.paths if len(p) > 1 and p[:-1] not in self.paths]
        if orphans:
            raise ValueError(
                f"tree.paths: {list(orphans[0])} has no parent {list(orphans[0][:-1])}; add it"
            )

    @property
    def is_chain(self) -> bool:
        return self.kind == "chain"

    @property
    def is_auto(self) -> bool:
        return self.kind == "dynamic" and self.num_tokens == "auto"

    @property
    def most(self) -> int:
        """Draft tokens of a chain or a dynamic tree, at most."""
        if self.is_chain:
            return self.depth
        return 59 if self.num_tokens == "auto" else self.num_tokens

    @property
    def width(self) -> int:
        """Children of the root."""
        if self.kind == "static":
            return sum(1 for path in self.paths if len(path) == 1)
        return 1 if self.is_chain else self.top_k

    @property
    def label(self) -> str:
        """The shape as ``parse`` reads it."""
        if self.kind == "static":
            return "static"
        sizes = [self.depth] if self.is_chain else [self.depth, self.top_k, self.num_tokens]
        return ":".join([self.kind, *map(str, sizes)])

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """Read ``chain:M``, ``static``, or ``dynamic[:DEPTH:TOP_K:TOKENS]``; TOKENS may be auto.

        Raises:
            ValueError: none of these.
        """
        kind, *sizes = text.split(":")
        names = {"chain": ["depth"], "static": [], "dynamic": ["depth", "top_k", "num_tokens"]}
        expected = names.get(kind)
        right_count = expected is not None and len(sizes) in {len(expected), 0}
        is_auto = kind == "dynamic" and sizes[2:] == ["auto"]
        numbers = sizes[:2] if is_auto else sizes
        if not right_count or not all(size.isdecimal() for size in numbers):
            raise ValueError(
                f"tree: {text!r} is no tree; give chain:7, static, or dynamic:7:10:59 (levels, "
                "beams, draft tokens or auto)"
            )
        assert expected is not None
        fields: Values = dict(zip(expected, map(int, numbers), strict=False))
        if is_auto:
            fields["num_tokens"] = "auto"
        return cls(kind=kind, **fields)  # type: ignore[arg-type]  # a key of names


def segment_sizes(
    num_rows: int, num_segments: int, max_rows: int | None, *, has_root: bool = True
) -> list[int]:
    """Rows of each segment that a tree is cut into: nearly equal, the longer ones last, none empty.

    Args:
        max_rows: there are more segments where one would have more draft tokens; None: no limit.
        has_root: the first row is no draft token, so a segment may have a row more than that.
    """
    if max_rows is not None:
        num_segments = max(num_segments, math.ceil((num_rows - has_root) / max_rows))
    cuts = [num_rows * part // num_segments for part in range(num_segments + 1)]
    return [stop - start for start, stop in pairwise(cuts) if start < stop]
