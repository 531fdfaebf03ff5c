"""Result of verifying draft tokens, and the error if logits choose no token."""

from collections.abc import Sequence
from dataclasses import dataclass

UNDRAWABLE = (
    "probabilities: their sum is {}, so no token can be drawn; a weight of the target or the draft "
    "is NaN or infinite, load another checkpoint"
)


NO_TOKEN = -1
"""In place of a token that NaN or infinite logits do not choose."""


class NotFinite(ValueError):
    """Raised if logits are NaN or infinite where they must choose a token."""

    path: Sequence[int] = ()
    """Rows of the tree before the token, if the rule knows them."""


def checked(token: int) -> int:
    """Return the token, or raise ``NotFinite`` for ``NO_TOKEN``."""
    if token == NO_TOKEN:
        raise NotFinite(UNDRAWABLE.format("not finite"))
    return token


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

    def __post_init__(self) -> None:
        try:
            checked(self.next_token)
        except NotFinite as error:
            error.path = self.path
            raise
