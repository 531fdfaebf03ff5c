"""Find draft tokens by looking up n-grams, or suffixes of any length, in the sequence.

Both estimate the next token's distribution from earlier occurrences of the current context, longer
contexts first. If a token followed a context c times out of C, its probability is (c + e) / (C +
1), with e the estimate from the next shorter context. The empty context falls back to the uniform
distribution (prediction by partial matching, Cleary and Witten 1984, escape method A). Every
request thus gets a draft token, and every acceptance rule gets a distribution.
"""

# R tree rows, V vocabulary, N tokens of text

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..tree import TokenTree
from .tree_source import TextSource

LookupKind = Literal["ngram", "suffix"]
"""ngram: by the last few tokens. suffix: by the longest suffix with an earlier occurrence, as in
SuffixDecoding (arXiv:2411.04975), but in this sequence only."""
ORDER = 4
"""Longest n-gram context in tokens; transformers' prompt lookup uses 2, vLLM 5."""


class Followers:
    """Tokens that followed each context in a text."""

    def __init__(self, kind: LookupKind, vocab_size: int) -> None:
        self.kind, self.vocab_size = kind, vocab_size
        self._text_N = torch.zeros(0, dtype=torch.int64)
        self._length_N = torch.zeros(1, dtype=torch.int64)
        """For each place 0 .. N, length of the longest context ending both there and at the end."""

    def extend(self, token: int) -> None:
        """Append one token to the text."""
        self._text_N = torch.cat([self._text_N, torch.tensor([token])])
        self._length_N = self._lengthened(self._length_N, token)

    def _lengthened(self, length_N: Tensor, token: int) -> Tensor:
        """Return lengths after one more token. Place i + 1 extends place i's context, or has 0."""
        next_N = torch.where(self._text_N == token, length_N + 1, 0)
        return torch.nn.functional.pad(next_N, (1, 0))

    def estimate(self, path: Sequence[int]) -> Tensor:
        """Return the distribution [V] after text and path, float32, by the module's formula."""
        length_N = self._length_N
        for token in path:
            length_N = self._lengthened(length_N[:-1], token)
        sizes = list(range(ORDER + 1))
        if self.kind == "suffix":  # a context counts once, whatever its length
            sizes = [0, *(length_N.unique() + 1).tolist()]
        p_V = torch.full((self.vocab_size,), 1 / self.vocab_size)
        for size in sizes:
            following = self._text_N[length_N[:-1] >= size]
            if not len(following):
                break
            total = len(following) + 1
            tokens, counts = following.unique(return_counts=True)
            p_V /= total
            p_V[tokens] += counts / total
        return p_V


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
