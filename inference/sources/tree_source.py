"""Drafts that can continue any of their own tokens: layers, chains, trees and micro-batches."""

# Q rows asked about, R forwarded rows, W children of each, H hidden, U draft vocabulary

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources.base import (
    DraftSource,
    Growth,
    Sampling,
    add_best,
    add_layer,
    deepest_rows,
)
from pipedraft.inference.tree import TokenTree
from pipedraft.models.layers import KeyValues
from pipedraft.models.target import Keep


@dataclass
class _FreshTree:
    """Draft tokens below the root that were drafted from the committed text alone.

    All of them, in the order of their making; some are merged into the session's tree.
    """

    tree: TokenTree
    sampling: Sampling
    merged: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Row -> its row in the session's tree."""

    @property
    def draft_tokens(self) -> range:
        return range(1, len(self.tree))

    def best(self, count: int | None = None) -> list[int]:
        """Best draft tokens by cumulative score; of a tie the older one, so parents come first."""
        return sorted(self.draft_tokens, key=lambda row: (-self.tree.scores[row], row))[:count]

    def merge(self, tree: TokenTree, chosen: list[int]) -> int:
        """Add draft tokens where their token path is not there yet; returns rows added."""
        before = len(tree)
        for row in chosen:
            parent = self.merged[self.tree.parents[row]]
            self.merged[row] = tree.add(parent, self.tree.tokens[row], self.tree.scores[row])
        return len(tree) - before


class TreeSource(DraftSource):
    """A draft that makes of a row of a tree, and of what precedes it, an output [H].

    ``leaf_logits`` continues rows of the session's tree from what was computed for them earlier;
    layers and micro-batches rest on it. ``grow_tree`` drafts a fresh tree below the root from the
    committed text alone. What was computed for its draft tokens stays with those that were merged.
    """

    grows: tuple[Growth, ...] = ("layers", "trees", "micro_batches")

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.num_forwards = 0
        self._restart()

    def _restart(self) -> None:
        """A new text."""
        self._fresh: _FreshTree | None = None
        self._root_waits = True
        """``expand_tree`` has not continued this root yet."""

    # -- what a subclass adds ---------------------------------------------------------------

    @property
    def _outputs(self) -> Mapping[int, Tensor]:
        """Name of a row -> output [H], for the rows below the root that were computed."""
        raise NotImplementedError

    def _root_output(self, tree: TokenTree) -> Tensor:
        """Output [H] after the root; takes in committed text that was not seen yet."""
        raise NotImplementedError

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        """Add the outputs of some rows; those of their parents are there."""
        raise NotImplementedError

    def _rename_rows(self, names: Mapping[int, int]) -> None:
        """Rows have another name; what is remembered of those without one is dropped."""
        raise NotImplementedError

    def _keep_rows(self, keep: Keep) -> None:
        """The tree's rows are renumbered."""
        raise NotImplementedError

    # -- rows of the session's tree ---------------------------------------------------------

    @property
    def draft_ids(self) -> Tensor:
        return self.draft.draft_ids

    def keep(self, keep: Keep) -> None:
        self._adopt_fresh()
        self._keep_rows(keep)
        self._root_waits = True

    def _name(self, tree: TokenTree, row: int) -> int:
        """Of a row in what is remembered: itself, or ~row in the fresh tree; its own inverse."""
        is_fresh = self._fresh is not None and tree is self._fresh.tree
        return ~row if is_fresh else row

    def _adopt_fresh(self) -> None:
        """End the fresh tree: its computed rows become those of the session's tree they are in.

        They replace what was computed for these from an older context.
        """
        if self._fresh is None:
            return
        merged, self._fresh = self._fresh.merged, None
        adopted = {~row: mine for row, mine in merged.items() if ~row in self._outputs}
        replaced = set(adopted.values())
        own = {row: row for row in self._outputs if row >= 0 and row not in replaced}
        self._rename_rows(own | adopted)

    def leaf_logits(
        self, tree: TokenTree, rows: list[int], features: Mapping[int, Tensor]
    ) -> Tensor:
        self._adopt_fresh()
        return self._logits(tree, rows)

    def _logits(self, tree: TokenTree, rows: list[int]) -> Tensor:
        # A leaf that got no child the last time it was asked for has its output already.
        names = {row: self._name(tree, row) for row in rows}
        missing = [row for row in rows if row and names[row] not in self._outputs]
        if missing:
            self._compute(tree, missing)
        outputs = [self._outputs[names[row]] if row else self._root_output(tree) for row in rows]
        return self.draft.logits(torch.stack(outputs))

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
    ) -> int:
        logits_QU = self.leaf_logits(tree, deepest_rows(tree), features)
        return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)

    def expand_tree(
        self,
        tree: TokenTree,
        num_forwards: int,
        width: int,
        *,
        by_score: bool,
        sampling: Sampling,
    ) -> int:
        before, limit = len(tree), self.num_forwards + num_forwards
        while self.num_forwards < limit:
            rows = self._rows_to_continue(tree, width, by_score)
            if not rows:
                break
            logits_QU = self.leaf_logits(tree, rows, {})
            self._root_waits = False
            if by_score:
                add_best(tree, rows, logits_QU, self.draft_ids, width, sampling)
                continue
            for row, logits_U in zip(rows, logits_QU, strict=True):
                share = max(1, width // len(rows))
                add_best(tree, [row], logits_U[None], self.draft_ids, share, sampling)
        return len(tree) - before

    def _rows_to_continue(self, tree: TokenTree, width: int, by_score: bool) -> list[int]:
        """The root once per context, and the best rows that were not continued yet.

        A child of a root that waits is left to the next forward pass, which needs this one's state.
        """
        self._adopt_fresh()
        waiting = [row for row in range(1, len(tree)) if row not in self._outputs]
        if self._root_waits:
            waiting = [row for row in waiting if tree.parents[row]]
        if by_score:
            waiting.sort(key=lambda row: -tree.scores[row])
        return [0] * self._root_waits + sorted(waiting[:width])

    # -- fresh trees ------------------------------------------------------------------------

    def grow_tree(
        self, tree: TokenTree, shape: TreeShape, *, by_score: bool, sampling: Sampling
    ) -> int:
        if shape.is_chain and sampling.samples_chain:
            levels = range(shape.depth)
            return sum(self.grow_layer(tree, {}, width=1, sampling=sampling) for _ in levels)
        self._adopt_fresh()
        self._fresh = fresh = _FreshTree(TokenTree(tree.tokens[0], tree.root_position), sampling)
        if shape.kind == "static":
            self._draft_static(fresh, shape.paths)
            chosen = list(fresh.draft_tokens)
        else:
            top_k = 1 if shape.is_chain else shape.top_k
            self._expand(fresh, [0], top_k)
            self._deepen(fresh, shape.depth - 1, top_k)
            chosen = fresh.best(shape.depth if shape.is_chain else shape.num_tokens)
        return fresh.merge(tree, chosen if by_score else sorted(chosen))

    def deepen_tree(self, tree: TokenTree, levels: int, num_tokens: int) -> int:
        fresh = self._fresh
        if fresh is None or not fresh.draft_tokens:
            return 0
        self._deepen(fresh, levels, len(fresh.tree.children(0)))
        unmerged = [row for row in fresh.best() if row not in fresh.merged]
        return fresh.merge(tree, unmerged[:num_tokens])

    def _deepen(self, fresh: _FreshTree, levels: int, top_k: int) -> None:
        """EAGLE-2: per level the best k draft tokens of the last one get k children each."""
        for _ in range(levels):
            beams = sorted(deepest_rows(fresh.tree), key=lambda row: -fresh.tree.scores[row])
            self._expand(fresh, beams[:top_k], top_k)

    def _expand(self, fresh: _FreshTree, parents: list[int], top_k: int) -> None:
        for parent, children in self._children(fresh, parents, top_k).items():
            for token, score in children:
                fresh.tree.add(parent, token, score)

    def _draft_static(self, fresh: _FreshTree, paths: tuple[tuple[int, ...], ...]) -> None:
        rows: dict[tuple[int, ...], int] = {(): 0}
        for level in range(1, max(map(len, paths)) + 1):
            here = [path for path in paths if len(path) == level]
            parents = list(dict.fromkeys(rows[path[:-1]] for path in here))
            children = self._children(fresh, parents, 1 + max(path[-1] for path in here))
            for path in here:
                parent = rows[path[:-1]]
                token, score = children[parent][path[-1]]
                rows[path] = fresh.tree.add(parent, token, score)

    def _children(
        self, fresh: _FreshTree, parents: list[int], width: int
    ) -> dict[int, list[tuple[int, float]]]:
        """The ``width`` best (token, cumulative score) below each row."""
        tree, logits_RU = fresh.tree, self._logits(fresh.tree, parents)
        positions = [tree.position(parent) + 1 for parent in parents]
        logprob_RU = fresh.sampling.rule.child_scores(logits_RU, self.draft_ids, positions)
        best_RW, index_RW = logprob_RU.topk(min(width, logprob_RU.shape[1]), -1)
        scores_RW = best_RW + best_RW.new_tensor([tree.scores[p] for p in parents])[:, None]
        tokens_RW = self.draft_ids[index_RW]
        rows = zip(parents, tokens_RW.tolist(), scores_RW.tolist(), strict=True)
        return {parent: list(zip(tokens, scores, strict=True)) for parent, tokens, scores in rows}


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


TEXT = sys.maxsize
"""Name of every row of the committed text; no tree has as many rows."""


class RowCache:
    """Keys and values of every draft layer, and the output, of rows.

    A row is computed once. One of the tree has the name of its row there, and stays until it leaves
    the tree or becomes text. It sees the text, and its ancestors-or-self among the cached rows.
    """

    def __init__(self, num_layers: int) -> None:
        self.names: list[int] = []
        """Of each cached row, in the order of the keys and values."""
        self.layers = [KeyValues() for _ in range(num_layers)]
        self.outputs: dict[int, Tensor] = {}
        """Name -> output [H], of the rows of the tree."""

    @property
    def num_text(self) -> int:
        return self.names.count(TEXT)

    def compute(
        self,
        tree: TokenTree,
        rows: list[int],
        forward: Callable[[list[KeyValues], Tensor], Tensor],
        *,
        num_text: int = 0,
        name: Callable[[int], int] = int,
    ) -> Tensor:
        """Add rows of the tree, and before them the next rows of the text.

        Args:
            rows: not cached yet; the ancestors of each are text, or cached, or precede it.
            forward: appends A + R rows to the caches of all layers, each seeing what the bool
                [A + R, C] says, and returns their outputs [A + R, H].
            num_text: A.
            name: of a row of this tree, and the other way round; it keeps rows of two trees apart.

        Returns:
            Outputs [A, H] of the rows of the text.
        """
        first, new = len(self.names), [name(row) for row in rows]
        self.names += [TEXT] * num_text + new
        text_C = torch.tensor([cached == TEXT for cached in self.names])
        earlier_AC = text_C.expand(num_text, -1).tril(first)
        ancestors_RC = tree.ancestors(rows, [name(cached) for cached in self.names])
        outputs_RH = forward(self.layers, torch.cat([earlier_AC, text_C | ancestors_RC]))
        self.outputs.update(zip(new, outputs_RH[num_text:], strict=True))
        return outputs_RH[:num_text]

    def rename(self, names: Mapping[int, int]) -> None:
        """Rows of the tree have moved or became ``TEXT``; those without a new name are dropped."""
        names = {**names, TEXT: TEXT}
        places = [place for place, name in enumerate(self.names) if name in names]
        self.layers = [layer.select(places) for layer in self.layers]
        self.names = [names[self.names[place]] for place in places]
        outputs = {names.get(name, TEXT): output for name, output in self.outputs.items()}
        outputs.pop(TEXT, None)
        self.outputs = outputs
