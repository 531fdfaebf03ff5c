"""Draft tokens by lookup (``followers``) under every schedule."""

# R tree rows, V vocabulary

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..followers import Followers, LookupKind
from ..tree import TokenTree
from .tree_source import TextSource


class Lookup(nn.Module):
    """Draft without neural network or training, as an engine expects it. Forwards are free."""

    num_stages: ClassVar[int | None] = None
    boundaries: ClassVar[tuple[int, ...]] = ()
    draft_ids: Tensor

    def __init__(self, draft_type: LookupKind, vocab_size: int) -> None:
        """
        Args:
            vocab_size: the target's.
        """
        super().__init__()
        self.draft_type = draft_type
        self.target_vocab_size = vocab_size
        self.register_buffer("draft_ids", torch.arange(vocab_size))

    def logits(self, log_probability_V: Tensor) -> Tensor:
        """Return the log-probabilities found by the source, unchanged."""
        return log_probability_V

    def relative_cost(self, target: object) -> float:
        return 0.0


def make_lookup(kind: LookupKind, target: PreTrainedModel) -> Lookup:
    return Lookup(kind, int(target.config.get_text_config().vocab_size))


class LookupSource(TextSource):
    """Draft tokens from a ``Lookup`` under every schedule.

    A forward is a free lookup. When the sequence grows, the root is looked up again. Other rows
    retain their results.
    """

    draft: Lookup

    def _restart(self) -> None:
        super()._restart()
        self._followers = Followers(self.draft.draft_type, self.draft.target_vocab_size)
        self._root: Tensor | None = None

    def _look(self, path: Sequence[int]) -> Tensor:
        self.num_forwards += 1
        return self._followers.estimate(path).log()

    def _root_output(self, tree: TokenTree) -> Tensor:
        tokens = self._take_pending().tokens
        for token in tokens:
            self._followers.extend(token)
        # An unchanged text gives the same counts.
        if tokens or self._root is None:
            self._root = self._look([])
        return self._root

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        self._root_output(tree)
        for row in rows:
            self._states[self._name(tree, row)] = self._look(path_to(tree, row))


def path_to(tree: TokenTree, row: int) -> list[int]:
    """Return the tokens from below the root to a row, its own last."""
    path = []
    while row:
        path.append(tree.tokens[row])
        row = tree.parents[row]
    return path[::-1]
