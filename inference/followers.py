"""Find draft tokens by looking up n-grams, or suffixes of any length, in the sequence.

Both estimate the next token's distribution from earlier occurrences of the current context, longer
contexts first. If a token followed a context c times out of C, its probability is (c + e) / (C +
1), with e the estimate from the next shorter context. The empty context falls back to the uniform
distribution (prediction by partial matching, Cleary and Witten 1984, escape method A). Every
request thus gets a draft token, and every acceptance rule gets a distribution.
"""

# V vocabulary, N tokens of text

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

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
