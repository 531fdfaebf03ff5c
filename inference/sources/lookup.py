"""Draft tokens by lookup in the sequence: n-gram prompt lookup, and a suffix automaton.

Both estimate the next token's distribution from earlier occurrences of the current context, longer
contexts first. If a token followed a context c times out of C, its probability is (c + e) / (C +
1), with e the estimate from the next shorter context; the empty context falls back to the uniform
distribution (prediction by partial matching, Cleary and Witten 1984, escape method A). Every
request thus gets a draft token, and every acceptance rule a distribution.
"""

# R tree rows, V vocabulary

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipedraft.inference.sources.tree_source import TextSource
from pipedraft.inference.tree import TokenTree

LookupKind = Literal["ngram", "suffix"]
"""ngram: by the last few tokens. suffix: by the longest suffix with an earlier occurrence."""
ORDER = 4
"""Longest n-gram context in tokens; transformers' prompt lookup uses 2, vLLM 5."""


class Followers(Protocol):
    """Tokens that followed each context in a sequence."""

    def extend(self, token: int) -> None:
        """Append one token to the sequence."""

    def contexts(self, path: Sequence[int]) -> Iterable[Mapping[int, int]]:
        """Yield, per context at the end of sequence and ``path``, how often each token followed it.

        The shortest context comes first.
        """


class NGrams:
    """Contexts with 0 .. ORDER tokens. Memory: ORDER + 1 entries per token."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def extend(self, token: int) -> None:
        for size in range(min(ORDER, len(self._text)) + 1):
            self._followers[tuple(self._text[len(self._text) - size :])][token] += 1
        self._text.append(token)

    def contexts(self, path: Sequence[int]) -> Iterable[Mapping[int, int]]:
        end = [*self._text[-ORDER:], *path][-ORDER:]
        for size in range(len(end) + 1):
            found = self._followers.get(tuple(end[len(end) - size :]))
            if not found:
                return
            yield found


class SuffixAutomaton:
    """Contexts of any length: the online automaton for all substrings (Blumer et al. 1985).

    A state represents substrings with the same end positions; ``counts`` is their number. With this
    automaton, SuffixDecoding (arXiv:2411.04975) drafts from the longest suffix that occurred
    earlier. Deviation: only this sequence is searched, so draft tokens depend on nothing else.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._counts = [-1], [0], [0]
        self._last = 0

    def extend(self, token: int) -> None:
        new = self._add({}, self._length[self._last] + 1, 0)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
        else:
            self._link[new] = self._reached(state, token)
        self._last = new
        # The token ends at one more position, and so do all its contexts.
        while new > 0:
            self._counts[new] += 1
            new = self._link[new]

    def _add(self, following: dict[int, int], length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._counts.append(count)
        return len(self._next) - 1

    def _reached(self, state: int, token: int) -> int:
        """Return the state of ``state``'s longest substring plus ``token``, split off if needed."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        # The shorter strings got another end position of their own: split them off.
        copy = self._add(dict(self._next[found]), self._length[state] + 1, self._counts[found])
        self._link[copy], self._link[found] = self._link[found], copy
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def contexts(self, path: Sequence[int]) -> Iterable[Mapping[int, int]]:
        state = self._last
        for token in path:
            while state >= 0 and token not in self._next[state]:
                state = self._link[state]
            state = self._next[state][token] if state >= 0 else 0
        chain = []
        while state >= 0:
            chain.append(state)
            state = self._link[state]
        for state in reversed(chain):
            found = self._next[state]
            if not found:
                return
            yield {token: self._counts[after] for token, after in found.items()}


MODELS: dict[LookupKind, type[NGrams] | type[SuffixAutomaton]] = {
    "ngram": NGrams,
    "suffix": SuffixAutomaton,
}


def estimate(followers: Followers, path: Sequence[int], vocab_size: int) -> Tensor:
    """Return the next token's distribution [V], float32, by the formula above."""
    p_V = torch.full((vocab_size,), 1 / vocab_size)
    for counts in followers.contexts(path):
        p_V /= sum(counts.values()) + 1
        tokens = torch.tensor(list(counts))
        p_V[tokens] += torch.tensor(list(counts.values())) / (sum(counts.values()) + 1)
    return p_V


class Lookup(nn.Module):
    """Draft with no neural network and no training, as an engine sees it; forwards are free."""

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

    A forward is a free lookup. When the sequence grows, the root is looked up again; other rows
    retain their results.
    """

    draft: Lookup

    def _restart(self) -> None:
        super()._restart()
        self._followers = MODELS[self.draft.draft_type]()
        self._root: Tensor | None = None

    def _look(self, path: Sequence[int]) -> Tensor:
        self.num_forwards += 1
        return estimate(self._followers, path, self.draft.target_vocab_size).log()

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
