"""How many draft tokens pay: their probabilities against what a row costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

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
