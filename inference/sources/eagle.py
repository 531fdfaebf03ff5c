"""EAGLE heads at decode time: chains, static trees, EAGLE-2's dynamic trees, and layers.

The head's key-value rows of committed positions are kept and only extended. Guesses below the root
are drafted from them; what a draft computed for its own guesses is dropped when the text moves on,
because the target's true states replace it.
"""

# P committed rows, R rows of a call, C cached rows (P and those of guesses), H hidden, k beams
# U draft vocabulary

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources import (
    DraftSource,
    Growth,
    Sampling,
    add_layer,
    add_sampled,
    deepest_rows,
)
from pipedraft.inference.tree import TokenTree
from pipedraft.models.eagle import KeyValues
from pipedraft.models.target import Keep


@dataclass
class _Candidates:
    """Guesses of one fresh tree below the root, in the order of their making, parents first.

    Guess i has a row in the head's cache once it was forwarded, because it got children.
    """

    cache: KeyValues
    """A fork of the committed rows, then the forwarded guesses."""
    root_state: Tensor
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """-1: the root."""
    scores: list[float] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)
    """Guess -> the head's output for it [H]."""
    cache_rows: dict[int, int] = field(default_factory=dict)
    """Guess -> its row in the cache."""
    tree_rows: dict[int, int] = field(default_factory=dict)
    """Guess -> its row in the session's token tree."""

    def add(self, token: int, parent: int, score: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.levels.append(1 if parent < 0 else self.levels[parent] + 1)

    def ancestors(self, guess: int) -> list[int]:
        found = []
        while guess >= 0:
            found.append(guess)
            guess = self.parents[guess]
        return found


class EagleSource(DraftSource):
    """Guesses of an EAGLE head.

    ``grow_tree`` drafts below the root from committed states alone. ``grow_layer`` continues rows
    of the tree from what the head computed for them earlier: their own rows stay as they were
    drafted while the committed ones below them are refreshed with the target's states.
    """

    grows: tuple[Growth, ...] = ("layers", "trees")

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.taps = draft.taps
        self.num_forwards = 0
        self._reset()

    def _reset(self) -> None:
        self._committed = KeyValues()
        self._pending: list[tuple[Mapping[int, Tensor], list[int]]] = []
        self._root_state: Tensor | None = None
        self._candidates: _Candidates | None = None
        self._row_cache, self._row_states = KeyValues(), dict[int, Tensor]()
        self._row_places: dict[int, int] = {}

    def begin(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        self._reset()
        self.observe(features, next_tokens)

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        """Taken in with the next growth: text that nobody continues costs nothing."""
        self._pending.append((features, next_tokens))
        self._candidates = None

    def keep(self, keep: Keep) -> None:
        """Forget the rows that left the tree, and the new root's: its true state follows."""
        retained = keep.rows[keep.num_committed :]
        place = {row: index for index, row in enumerate(retained)}
        self._row_states = {
            place[row]: state for row, state in self._row_states.items() if place.get(row, 0)
        }
        cached = [row for row in self._row_places if place.get(row, 0)]
        self._row_cache = self._row_cache.select([self._row_places[row] for row in cached])
        self._row_places = {place[row]: index for index, row in enumerate(cached)}

    # -- the head -------------------------------------------------------------------------------

    def _forward(
        self,
        tokens: Sequence[int],
        states_RH: Tensor,
        positions: Sequence[int],
        cache: KeyValues,
        visible_RC: Tensor,
    ) -> Tensor:
        self.num_forwards += 1
        device = states_RH.device
        return self.draft.rows(
            torch.tensor(tokens, device=device),
            states_RH,
            positions_R=torch.tensor(positions, device=device),
            cache=cache,
            visible_RC=visible_RC.to(device),
        )

    def _catch_up(self) -> Tensor:
        """State of the root, after the committed positions that are still to be taken in."""
        if self._pending:
            features = [self.draft.feature(taps) for taps, _ in self._pending]
            tokens = [token for _, part in self._pending for token in part]
            self._pending = []
            first = self._committed.num_rows
            visible = torch.ones(len(tokens), first + len(tokens), dtype=torch.bool).tril(first)
            positions = range(first, first + len(tokens))
            states = self._forward(tokens, torch.cat(features), positions, self._committed, visible)
            self._root_state = states[-1]
        assert self._root_state is not None
        return self._root_state

    # -- trees ----------------------------------------------------------------------------------

    def grow_tree(
        self, tree: TokenTree, shape: TreeShape, *, by_score: bool, sampling: Sampling
    ) -> int:
        root_state = self._catch_up()
        fork = KeyValues(self._committed.keys, self._committed.values)
        if shape.is_chain and sampling.samples_chain:
            return self._sample_chain(tree, shape.depth, fork, root_state, sampling)
        self._candidates = candidates = _Candidates(fork, root_state)
        if shape.kind == "static":
            self._draft_static(candidates, shape.paths)
            chosen = list(range(len(candidates.tokens)))
        else:
            top_k = 1 if shape.is_chain else shape.top_k
            self._expand(candidates, [-1], top_k)
            self._deepen(candidates, shape.depth - 1, top_k)
            chosen = _best(candidates, shape.depth if shape.is_chain else shape.num_tokens)
        return _merge(tree, candidates, chosen if by_score else sorted(chosen))

    def deepen_tree(self, tree: TokenTree, levels: int, num_tokens: int) -> int:
        candidates = self._candidates
        if candidates is None or not candidates.tokens:
            return 0
        self._deepen(candidates, levels, num_beams(candidates))
        new = [i for i in _best(candidates, None) if i not in candidates.tree_rows]
        return _merge(tree, candidates, new[:num_tokens])

    def _deepen(self, candidates: _Candidates, levels: int, top_k: int) -> None:
        """EAGLE-2: per level the best k candidates of the last one get k children each."""
        for _ in range(levels):
            last = max(candidates.levels)
            beams = [i for i in range(len(candidates.tokens)) if candidates.levels[i] == last]
            beams.sort(key=lambda i: -candidates.scores[i])
            self._run(candidates, beams[:top_k])
            self._expand(candidates, beams[:top_k], top_k)

    def _draft_static(self, candidates: _Candidates, paths: tuple[tuple[int, ...], ...]) -> None:
        places: dict[tuple[int, ...], int] = {(): -1}
        for level in range(1, max(map(len, paths)) + 1):
            here = [path for path in paths if len(path) == level]
            parents = list(dict.fromkeys(places[path[:-1]] for path in here))
            if level > 1:
                self._run(candidates, parents)
            width = 1 + max(path[-1] for path in here)
            children = self._children(candidates, parents, width)
            for path in here:
                parent = places[path[:-1]]
                token, score = children[parent][path[-1]]
                places[path] = len(candidates.tokens)
                candidates.add(token, parent, score)

    def _run(self, candidates: _Candidates, guesses: list[int]) -> None:
        """Forward guesses of one level; they share a position."""
        parents = [candidates.parents[guess] for guess in guesses]
        states = [candidates.states[p] if p >= 0 else candidates.root_state for p in parents]
        committed, cached = self._committed.num_rows, candidates.cache.num_rows
        for index, guess in enumerate(guesses):
            candidates.cache_rows[guess] = cached + index
        visible = torch.zeros(len(guesses), cached + len(guesses), dtype=torch.bool)
        visible[:, :committed] = True
        for index, guess in enumerate(guesses):
            visible[index, [candidates.cache_rows[a] for a in candidates.ancestors(guess)]] = True
        outputs = self._forward(
            [candidates.tokens[guess] for guess in guesses],
            torch.stack(states),
            [committed - 1 + candidates.levels[guess] for guess in guesses],
            candidates.cache,
            visible,
        )
        candidates.states.update(zip(guesses, outputs, strict=True))

    def _children(
        self, candidates: _Candidates, parents: list[int], width: int
    ) -> dict[int, list[tuple[int, float]]]:
        """The ``width`` most likely (token, cumulative score) below each forwarded guess."""
        states = [candidates.states[p] if p >= 0 else candidates.root_state for p in parents]
        logprob_RU = self.draft.logits(torch.stack(states)).float().log_softmax(-1)
        best_RW, index_RW = logprob_RU.topk(min(width, logprob_RU.shape[1]), -1)
        base = [candidates.scores[p] if p >= 0 else 0.0 for p in parents]
        scores_RW = best_RW + best_RW.new_tensor(base)[:, None]
        tokens_RW = self.draft.draft_ids[index_RW]
        rows = zip(parents, tokens_RW.tolist(), scores_RW.tolist(), strict=True)
        return {parent: list(zip(tokens, scores, strict=True)) for parent, tokens, scores in rows}

    def _expand(self, candidates: _Candidates, parents: list[int], top_k: int) -> None:
        for parent, children in self._children(candidates, parents, top_k).items():
            for token, score in children:
                candidates.add(token, parent, score)

    def _sample_chain(
        self,
        tree: TokenTree,
        length: int,
        cache: KeyValues,
        state_H: Tensor,
        sampling: Sampling,
    ) -> int:
        """One sampled guess per level, each with its q."""
        leaf = 0
        for level in range(length):
            if level:
                position = self._committed.num_rows - 1 + level
                visible = torch.ones(1, cache.num_rows + 1, dtype=torch.bool)
                token = [tree.tokens[leaf]]
                state_H = self._forward(token, state_H[None], [position], cache, visible)[0]
            leaf = add_sampled(tree, leaf, self.draft.logits(state_H), self.draft, sampling)
        return length

    # -- layers ---------------------------------------------------------------------------------

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
    ) -> int:
        states = [self._catch_up()]
        if len(tree) > 1:
            states = self._leaf_states(tree, deepest_rows(tree))
        logits_QU = self.draft.logits(torch.stack(states))
        return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)

    def _leaf_states(self, tree: TokenTree, leaves: list[int]) -> list[Tensor]:
        """Outputs of the head for rows of the tree, from those of their parents."""
        # A leaf that got no child the last time it was deepest has its output already.
        new = [row for row in leaves if row not in self._row_states]
        if new:
            self._run_rows(tree, new)
        return [self._row_states[row] for row in leaves]

    def _run_rows(self, tree: TokenTree, rows: list[int]) -> None:
        assert self._root_state is not None
        parents = [tree.parents[row] for row in rows]
        states = [self._row_states[p] if p else self._root_state for p in parents]
        committed, cached = self._committed.num_rows, self._row_cache.num_rows
        for index, row in enumerate(rows):
            self._row_places[row] = cached + index
        visible = torch.zeros(len(rows), committed + cached + len(rows), dtype=torch.bool)
        visible[:, :committed] = True
        for index, row in enumerate(rows):
            while row:  # the root is a committed row here
                visible[index, committed + self._row_places[row]] = True
                row = tree.parents[row]
        cache = KeyValues(self._committed.keys, self._committed.values)
        if self._row_cache.keys is not None and self._row_cache.values is not None:
            cache.append(self._row_cache.keys, self._row_cache.values)
        tokens = [tree.tokens[row] for row in rows]
        positions = [committed - 1 + tree.depths[row] for row in rows]
        outputs = self._forward(tokens, torch.stack(states), positions, cache, visible)
        assert cache.keys is not None and cache.values is not None
        self._row_cache = KeyValues(cache.keys[:, committed:], cache.values[:, committed:])
        self._row_states.update(zip(rows, outputs, strict=True))


def num_beams(candidates: _Candidates) -> int:
    """k of the tree: the root's children."""
    return candidates.parents.count(-1)


def _best(candidates: _Candidates, count: int | None) -> list[int]:
    """Best guesses by cumulative score; a tie goes to the older one, so parents come first."""
    order = sorted(range(len(candidates.tokens)), key=lambda i: (-candidates.scores[i], i))
    return order[:count]


def _merge(tree: TokenTree, candidates: _Candidates, chosen: list[int]) -> int:
    """Add guesses to the tree where their token path is not there yet; returns rows added."""
    before = len(tree)
    for guess in chosen:
        parent = candidates.parents[guess]
        row = 0 if parent < 0 else candidates.tree_rows[parent]
        candidates.tree_rows[guess] = tree.add(
            row, candidates.tokens[guess], candidates.scores[guess]
        )
    return len(tree) - before
