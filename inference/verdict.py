"""Result of verifying draft tokens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Result of one verification."""

    path: list[int]
    """Accepted rows from the root down. The logits of all of them have returned."""
    next_token: int
    """Token after the path. It is outside the tree, or a child with logits still in flight."""
    tests: list[bool]
    """One entry per position with draft tokens: True if one was accepted."""
    restarts: bool = False
    """True if no row in the tree remains valid, whatever follows the path."""
