"""Draft tree shapes, draft-token budgets, and cutting a tree into segments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from ..errors import check_ranges
from ..files import Values

Budget: TypeAlias = int | Literal["auto"]
"""Number of draft tokens. With auto, the cost model and the draft's probabilities choose it."""
Growth = Literal["layers", "trees", "micro_batches"]
"""Method a schedule calls to extend the token tree."""
MOST_ROWS = 16
"""Maximum rows per segment with an automatic budget: FlowSpec's L_max."""
LONGEST = 3.0
"""Price factor for a row that enters at a step, compared with a row in equally long segments.
Segments differ in length, and the longest one in flight sets the step time
(docs/lab/drafting_trials.md)."""
SHARPNESS = 3.0
"""Exponent applied to draft probabilities before weighing. The best tokens are accepted more often
than the draft predicts, and the others less often (docs/lab/drafting_trials.md)."""


@dataclass(frozen=True, kw_only=True)
class RowCosts:
    """Costs and benefits for weighing draft tokens."""

    tokens: float
    """Number of tokens emitted without the draft tokens."""
    time: float
    """Time for these tokens."""
    row: float
    """Time added by each draft token."""
    later: float = 1.0
    """Price factor for rows from later draft forwards: entering now saves at most a step."""
    sharpness: float = SHARPNESS
    """Exponent for draft probabilities. See ``SHARPNESS``; larger for an under-confident draft."""


def rows_that_pay(scores: Sequence[float], costs: RowCosts) -> int:
    """Return how many of the best rows give the most tokens per unit of time.

    A row is emitted if its whole path is accepted, with a probability p from its cumulative score.
    The k best rows yield ``tokens`` + p_1 + .. + p_k tokens in the time ``time`` + k * ``row``. p
    falls from row to row, so the rate is highest just before the first row with p / ``row`` below
    the rate so far.

    Args:
        scores: cumulative log-probabilities, descending.
    """
    tokens, time = costs.tokens, costs.time
    for count, score in enumerate(scores):
        probability = math.exp(score)
        # Compare p / row with tokens / time, without dividing by a row price of 0.
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
"""Child ranks from the root: EAGLE-1's published tree with 25 draft tokens for 7B chat models."""


PAPER = "dynamic:7:10:59"
"""EAGLE-2's tree: 60 tokens with the root."""
MAX_SIZE = "[1, 1024]"
"""Range for levels, beams and draft tokens per tree."""


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Tree drafted below the root in one round."""

    kind: Literal["chain", "static", "dynamic", "auto"] = "dynamic"
    """dynamic: EAGLE-2, the best ``num_tokens`` candidates by cumulative score. static: the ranks
    in ``paths``, whatever the scores. chain: one draft token per level. auto: in every round the
    shape with the most tokens per second so far, which may be no draft (inference/auto_tree.py)."""
    depth: int = 7
    """Levels of draft tokens (draft forwards). EAGLE's code counts only expansions after the first
    level: its depth 6 is 7 here. A chain of 0 drafts nothing."""
    top_k: int = 10
    """Beams in a dynamic tree, and children per beam."""
    num_tokens: Budget = 59
    """Draft tokens in a dynamic tree, not counting the root; auto: at most 59."""
    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS
    """Child ranks from the root to every draft token in a static tree, including all parents."""

    def __post_init__(self) -> None:
        sizes = ["depth", "top_k", *["num_tokens"] * (self.num_tokens != "auto")]
        ranges = dict.fromkeys(sizes, MAX_SIZE)
        check_ranges(self, ranges | ({"depth": "[0, 1024]"} if self.is_chain else {}), "tree.")
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
        """Maximum draft tokens in a chain or dynamic tree."""
        if self.is_chain:
            return self.depth
        return 59 if self.num_tokens == "auto" else self.num_tokens

    @property
    def width(self) -> int:
        """Children at the root."""
        if self.kind == "static":
            return sum(1 for path in self.paths if len(path) == 1)
        return 1 if self.is_chain else self.top_k

    @property
    def label(self) -> str:
        """Return the shape in the format ``parse`` reads, or "none" without draft tokens."""
        if self.kind in ("static", "auto"):
            return self.kind
        if self.is_chain and not self.depth:
            return "none"
        sizes = [self.depth] if self.is_chain else [self.depth, self.top_k, self.num_tokens]
        return ":".join([self.kind, *map(str, sizes)])

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """Read ``auto``, ``paper``, ``chain:M``, ``static``, or ``dynamic[:DEPTH:TOP_K:TOKENS]``.

        ``paper`` is EAGLE-2's tree, which EAGLE-3 uses, too. TOKENS may be auto.
        """
        kind, *sizes = PAPER.split(":") if text == "paper" else text.split(":")
        dynamic = ["depth", "top_k", "num_tokens"]
        names = {"chain": dynamic[:1], "static": [], "dynamic": dynamic, "auto": []}
        is_auto = kind == "dynamic" and sizes[2:] == ["auto"]
        numbers = sizes[:2] if is_auto else sizes
        is_counted = kind in names and len(sizes) in (0, len(names[kind]))
        if not is_counted or not all(size.isdecimal() and int(size) for size in numbers):
            raise ValueError(
                f"tree: {text!r} is no tree; give auto, paper, chain:7, static, or {PAPER} "
                "(levels, beams, draft tokens or auto)"
            )
        fields: Values = dict(zip(names[kind], map(int, numbers), strict=False))
        if is_auto:
            fields["num_tokens"] = "auto"
        return cls(kind=kind, **fields)  # type: ignore[arg-type]  # a key of names


NO_DRAFT = TreeShape(kind="chain", depth=0)
"""Autoregressive decoding, among the shapes of ``--tree auto``."""


def segment_sizes(
    num_rows: int, num_segments: int, max_rows: int | None, *, has_root: bool = True
) -> list[int]:
    """Return nearly equal segment sizes for a tree, in rows. No segment is empty.

    The first segment has the fewest rows, so its result returns sooner.

    Args:
        max_rows: maximum draft tokens per segment. More segments are used if needed.
        has_root: the first row is no draft token, so its segment may have one row more.
    """
    if max_rows is not None:
        num_segments = max(num_segments, math.ceil((num_rows - has_root) / max_rows))
    # Rounding down makes the first segment the shortest: its result returns sooner.
    cuts = [num_rows * part // num_segments for part in range(num_segments + 1)]
    return [stop - start for start, stop in pairwise(cuts) if start < stop]
