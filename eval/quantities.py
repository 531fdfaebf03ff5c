"""What runs are compared by: ratios of sums over prompts, read from the rows of results.json."""

from dataclasses import dataclass
from typing import Any

from pipedraft.eval.breakdown import ENTROPY_EDGES

Entry = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Quantity:
    """A ratio of sums over prompts: [n] sum(numerator) / sum(denominator)."""

    name: str
    label: str
    numerator: str
    denominator: str
    times_stages: bool = False
    place: int | None = None
    """In the fields, where these are lists."""

    def counts(self, row: Row) -> tuple[float, float]:
        fields = (row[self.numerator], row[self.denominator])
        return fields if self.place is None else tuple(field[self.place] for field in fields)


QUANTITIES = (
    Quantity("equivalent_acceptance_length", "L'", "tokens", "steps", times_stages=True),
    Quantity("theoretical_speedup", "S", "virtual_time_autoregressive", "virtual_time"),
    Quantity("tokens_per_s", "tokens/s", "tokens", "decode_s"),
)
WALLCLOCK = QUANTITIES[-1]
BY_ENTROPY = tuple(
    Quantity(
        f"draft_acceptance_rate from {low:g} nats",
        f"alpha, {low:g} nats",
        "entropy_accepts",
        "entropy_tests",
        place=place,
    )
    for place, low in enumerate(ENTROPY_EDGES)
)


def has(quantity: Quantity, entry: Entry) -> bool:
    """Whether every prompt recorded it, and anything was counted."""
    rows = entry["per_prompt"]
    fields = (quantity.numerator, quantity.denominator)
    if not all(field in row for row in rows for field in fields):
        return False
    return sum(quantity.counts(row)[1] for row in rows) > 0
