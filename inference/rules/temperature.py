"""Range of temperatures."""

MIN_TEMPERATURE = 1e-4
"""Smallest temperature above 0. Logits divided by a smaller number may overflow."""
MAX_TEMPERATURE = 1e6


def check_temperature(value: float) -> None:
    """Refuse a temperature if logits divided by it may overflow or lose all differences."""
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature: {value} is out of range; give 0 (greedy) or {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}"
        )
