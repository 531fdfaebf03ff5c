"""Draft tokens looked up in the text: prompt lookup by n-grams, and a suffix automaton.

Both estimate the next token's distribution from what followed the same context in the text so far,
longer contexts before shorter ones. A context that was followed c times by a token, C times by any,
gives it (c + e) / (C + 1), e being the estimate of the next shorter context; the empty context's
shorter one is uniform (prediction by partial matching, Cleary and Witten 1984, escape method A).
So there is a draft token wherever one is asked for, and a distribution for every acceptance rule.
"""

# R rows of the tree, V vocabulary

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipedraft.inference.sources.tree_source import TextSource
from pipedraft.inference.tree import TokenTree

LookupKind = Literal["ngram", "suffix"]
"""By the last few tokens, or by the longest end of the text that occurred before."""
ORDER = 4
"""Tokens of the longest context of the n-grams; transformers' prompt lookup takes 2, vLLM 5."""


class Followers(Protocol):
    """Tokens that followed the contexts of a text."""

    def extend(self, token: int) -> None:
        """One more token of the text."""

    def contexts(self, path: Sequence[int]) -> Iterable[Mapping[int, int]]:
        """Counts of next tokens after the text and ``path``, shortest context first."""


class NGrams:
    """Contexts of 0 .. ORDER tokens. Memory: ORDER + 1 entries a token."""

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
    """All contexts of any length: the online automaton of a text's substrings (Blumer et al. 1985).

    A state stands for substrings that end at the same places; ``counts`` says at how many. With it
    SuffixDecoding (arXiv:2411.04975) drafts from the longest end of the text that occurred before.
    Deviation: the text of this sequence alone, so that its draft tokens depend on nothing else.
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
        # The token ends at one more place, and so do all its contexts.
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
        """The state of ``token`` after ``state``'s longest substring, split off if it is longer."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
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
    """Distribution [V] of the next token, float32, by the formula above."""
    p_V = torch.full((vocab_size,), 1 / vocab_size)
    for counts in followers.contexts(path):
        p_V /= sum(counts.values()) + 1
        tokens = torch.tensor(list(counts))
        p_V[tokens] += torch.tensor(list(counts.values())) / (sum(counts.values()) + 1)
    return p_V


class Lookup(nn.Module):
    """A draft without a network or training, as an engine sees it; a forward costs nothing."""

    num_stages: ClassVar[int | None] = None
    boundaries: ClassVar[tuple[int, ...]] = ()
    draft_ids: Tensor

    def __init__(self, draft_type: LookupKind, vocab_size: int) -> None:
        """
        Args:
            vocab_size: of the target.
        """
        super().__init__()
        self.draft_type = draft_type
        self.target_vocab_size = vocab_size
        self.register_buffer("draft_ids", torch.arange(vocab_size))

    def logits(self, log_probability_V: Tensor) -> Tensor:
        """Log-probabilities that the source has looked up, unchanged."""
        return log_probability_V

    def relative_cost(self, target: object) -> float:
        return 0.0


def make_lookup(kind: LookupKind, target: PreTrainedModel) -> Lookup:
    return Lookup(kind, int(target.config.get_text_config().vocab_size))


class LookupSource(TextSource):
    """Draft tokens of a ``Lookup`` under every schedule.

    A forward is a look at the followers, which costs nothing. What was looked up is forgotten when
    the text grows: it may say more then.
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
        if tokens or self._root is None:
            self._root = self._look([])
        return self._root

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        self._root_output(tree)
        for row in rows:
            self._states[self._name(tree, row)] = self._look(path_to(tree, row))


def path_to(tree: TokenTree, row: int) -> list[int]:
    """Tokens below the root on the way to a row, its own last."""
    path = []
    while row:
        path.append(tree.tokens[row])
        row = tree.parents[row]
    return path[::-1]
