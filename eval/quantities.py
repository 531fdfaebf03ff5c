"""What runs are compared by: ratios of sums over prompts, read from the rows of results.json."""

from dataclasses import dataclass

from msgspec import UNSET

from pipedraft.eval.breakdown import ENTROPY_EDGES
from pipedraft.eval.record import PromptRecord, RunRecord


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

    def counts(self, row: PromptRecord) -> tuple[float, float] | None:
        """None: this prompt did not record it."""
        fields = getattr(row, self.numerator), getattr(row, self.denominator)
        if UNSET in fields:
            return None
        return fields if self.place is None else (fields[0][self.place], fields[1][self.place])


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


def has(quantity: Quantity, entry: RunRecord) -> bool:
    """Whether every prompt recorded it, and anything was counted."""
    counts = [quantity.counts(row) for row in entry.per_prompt]
    return None not in counts and sum(count[1] for count in counts if count) > 0
