"""Drafts that read the text alone, and so the pending root as well."""

# H hidden

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipedraft.inference.sources.tree_source import TreeSource


class TextSource(TreeSource):
    """Committed text waits until draft tokens below it are wanted: what nobody continues costs
    nothing.

    What was computed for a draft token that becomes text stays.
    """

    def __init__(self, draft: Any) -> None:
        super().__init__(draft)
        self._reset([])

    def _reset(self, tokens: list[int]) -> None:
        self._pending = tokens
        """Committed text that the draft has not seen yet."""
        self._num_taken_in = 0
        """Of the next tokens to be observed: those whose rows a Keep has made text already."""
        self._restart()

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._reset(list(tokens))

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        self._pending += next_tokens[self._num_taken_in :]
        self._num_taken_in = 0
