"""Draft sources that can continue any draft token, by layers, trees or micro-batches."""

# Q rows to continue, R forwarded rows, W children per row, H hidden, U draft vocabulary

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...models.heads.draft_calls import call
from ...models.target import KeepRows
from ..rules.sampled import RecursiveVerifier
from ..shapes import TreeShape
from ..tree import TokenTree
from .base import (
    DraftSampling,
    DraftSource,
    Expansion,
    Features,
    Growth,
    add_children,
    add_layer,
    best_children,
    deepest_rows,
)
from .graph_call import ChildQuery, GraphCall
from .graph_rows import GraphRows, make_rows
from .row_cache import NOBODY, TEXT, NewText, RowCache

_Child: TypeAlias = tuple[int, float, Tensor | None]
"""Token, cumulative score, and q if the token was sampled from q."""


@dataclass
class _FreshTree:
    """Tree drafted from committed tokens alone, partly merged into the session's tree."""

    tree: TokenTree
    sampling: DraftSampling
    merged: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Row -> its row in the session's tree."""

    @property
    def draft_tokens(self) -> range:
        return range(1, len(self.tree))

    def best(self, count: int | None = None) -> list[int]:
        """Return the best draft tokens by cumulative score, parents first at equal scores."""
        return sorted(self.draft_tokens, key=lambda row: (-self.tree.scores[row], row))[:count]

    def merge(self, tree: TokenTree, chosen: list[int]) -> int:
        """Add draft tokens with new token paths, and return the number of rows added."""
        before = len(tree)
        for row in chosen:
            # chosen lists parents first, so the parent has a row in the tree already.
            parent = self.merged[self.tree.parents[row]]
            mine = self.tree
            q_V = mine.draft_probabilities[row]
            self.merged[row] = tree.add(parent, mine.tokens[row], mine.scores[row], q_V)
        return len(tree) - before


class TreeSource(DraftSource):
    """Draft source that computes a tree row's output [H] from the row and its ancestors.

    ``leaf_logits``, for layers and micro-batches, continues rows in the session's tree from earlier
    results. ``grow_tree`` drafts a fresh tree below the root from committed tokens alone. Results
    for merged draft tokens are retained.
    """

    grows: tuple[Growth, ...] = ("layers", "trees", "micro_batches")
    reads_features = True
    """True if a row's result depends on the target's current hidden states. Of two rows for one
    draft token, True keeps the later one. False keeps the earlier one, because its cache place is
    between its parent's and its children's."""

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.num_forwards = 0
        self._restart()

    def _restart(self) -> None:
        """Start a new sequence."""
        self._fresh: _FreshTree | None = None
        self._root_waits = True
        """True until ``expand_tree`` continues this root."""
        self._states: dict[int, Tensor] = {}
        """Outputs [H] by name, for rows below the root, unless a subclass stores them elsewhere."""
        self._pending = NewText([], [])
        """Committed tokens not read by the draft yet."""

    def begin(self, features: Features, tokens: list[int]) -> None:
        self._restart()
        self.observe(features, tokens[1:])

    def observe(self, features: Features, next_tokens: list[int]) -> None:
        """Queue committed tokens for the next growth. Without growth they are never computed."""
        self._pending.features.append(features)
        self._pending.tokens += next_tokens

    def _take_pending(self) -> NewText:
        text, self._pending = self._pending, NewText([], [])
        return text

    # -- what a subclass adds, or keeps elsewhere -------------------------------------------

    @property
    def _outputs(self) -> Mapping[int, Tensor]:
        """Outputs [H] of computed rows below the root, by row name."""
        return self._states

    @property
    def _known(self) -> Collection[int]:
        """Names of all computed rows below the root."""
        return self._outputs.keys()

    @property
    def _graph_rows(self) -> GraphRows | None:
        """CUDA graphs that replace ``_root_output`` and ``_compute``, or None without graphs."""
        return None

    def _num_passes(self, tree: TokenTree, has_text: bool, rows: list[int]) -> int:
        return int(has_text or bool(rows))

    def _root_output(self, tree: TokenTree) -> Tensor:
        """Read any committed tokens not read yet, then return the output [H] after the root."""
        raise NotImplementedError

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        """Compute outputs for some rows. The outputs of their parents exist already."""
        raise NotImplementedError

    def _rename_rows(self, names: Mapping[int, int]) -> None:
        """Rename rows, and forget rows without a new name."""
        self._states = {names[row]: x for row, x in self._states.items() if row in names}

    def _keep_rows(self, keep: KeepRows) -> None:
        """Renumber the tree's rows. The new root's output will be recomputed, as text."""
        # Place 0 is left out: the new root is read again with the target's true state.
        retained = keep.rows[keep.num_committed :]
        self._rename_rows({row: place for place, row in enumerate(retained) if place})

    # -- rows of the session's tree ---------------------------------------------------------

    @property
    def draft_ids(self) -> Tensor:
        return self.draft.draft_ids

    def keep(self, keep: KeepRows) -> None:
        self._adopt_fresh()
        self._keep_rows(keep)
        self._root_waits = True

    def _name(self, tree: TokenTree, row: int) -> int:
        """Return a row's name, or a name's row. A name is row, or ~row in the fresh tree."""
        is_fresh = self._fresh is not None and tree is self._fresh.tree
        return ~row if is_fresh else row

    def _adopt_fresh(self) -> None:
        """End the fresh tree. If merged, its computed rows move to the session's tree."""
        if self._fresh is None:
            return
        merged, self._fresh = self._fresh.merged, None
        adopted = {~row: mine for row, mine in merged.items() if ~row in self._known}
        mine = {row: row for row in self._known if row >= 0}
        twice = mine.keys() & adopted.values()
        if self.reads_features:
            mine = {row: row for row in mine if row not in twice}
        else:
            adopted = {row: name for row, name in adopted.items() if name not in twice}
        # One renaming for both: rows named in neither map are dropped.
        self._rename_rows(mine | adopted)

    def leaf_logits(self, tree: TokenTree, rows: list[int], features: Features) -> Tensor:
        self._adopt_fresh()
        return self._logits(tree, rows)

    def _logits(self, tree: TokenTree, rows: list[int]) -> Tensor:
        if self._graph_rows is not None:
            return self._query(self._graph_rows, tree, rows, ChildQuery())
        # A leaf left childless by an earlier call has its output already.
        names = {row: self._name(tree, row) for row in rows}
        missing = [row for row in rows if row and names[row] not in self._outputs]
        if missing:
            self._compute(tree, missing)
        outputs = [self._outputs[names[row]] if row else self._root_output(tree) for row in rows]
        return call(self.draft.logits, torch.stack(outputs))

    def _query(
        self, graph: GraphRows, tree: TokenTree, leaves: list[int], query: ChildQuery
    ) -> Tensor:
        """Forward the rows not computed yet, then query the children of some rows."""
        name, text = partial(self._name, tree), self._take_pending()
        missing = [row for row in leaves if row and name(row) not in graph.known]
        self.num_forwards += self._num_passes(tree, bool(text.tokens), missing) + query.levels
        return graph.grow(
            GraphCall(tree=tree, text=text, rows=missing, leaves=leaves, query=query, name=name)
        )

    def _best(
        self, tree: TokenTree, rows: list[int], width: int, sampling: DraftSampling
    ) -> Tensor:
        """Return the best children for rows, as in ``best_children``."""
        if self._graph_rows is None:
            logits_QU = self._logits(tree, rows)
            return best_children(tree, rows, logits_QU, self.draft_ids, width, sampling)
        query = ChildQuery(width, sampling=sampling)
        flat = self._query(self._graph_rows, tree, rows, query)
        return self._graph_rows.levels(flat, len(rows), query)[0].best_2QW

    def _best_rows(
        self, tree: TokenTree, rows: list[int], width: int, sampling: DraftSampling
    ) -> Tensor:
        """Run ``_best`` on rows in the session's tree."""
        self._adopt_fresh()
        return self._best(tree, rows, width, sampling)

    def best_levels(
        self,
        tree: TokenTree,
        leaves: list[int],
        features: Features,
        *,
        width: int,
        levels: int,
        sampling: DraftSampling,
        beams: int = 0,
    ) -> Iterator[Tensor]:
        graph = self._graph_rows
        if graph is None or levels == 1 or not beams:
            yield self._best_rows(tree, leaves, width, sampling)
            return
        self._adopt_fresh()
        query = ChildQuery(width, levels - 1, beams, then=1, sampling=sampling)
        found = graph.levels(self._query(graph, tree, leaves, query), len(leaves), query)
        self.num_forwards -= query.levels  # count only forwards whose children are requested
        order = list(range(len(leaves)))
        for number, level in enumerate(found):
            self.num_forwards += number > 0
            before = len(tree)
            yield level.best_2QW[:, order]
            tokens_QW, rows = level.best_2QW[0].long().tolist(), []
            for leaf, column in (divmod(place, len(tokens_QW[0])) for place in level.beams):
                row = tree.child(leaves[leaf], tokens_QW[leaf][column]) if leaves[leaf] >= 0 else -1
                rows.append(NOBODY if row is None or row < before else row)
            if not {*range(before, len(tree))} <= {*rows}:
                return  # the caller may add other children; stop then
            graph.extend(rows)
            leaves, order = rows, [rows.index(row) for row in range(before, len(tree))]

    def grow_layer(
        self, tree: TokenTree, features: Features, *, width: int, sampling: DraftSampling
    ) -> int:
        leaves = deepest_rows(tree)
        if sampling.samples_chain:
            logits_QU = self.leaf_logits(tree, leaves, features)
            return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)
        best_2QW = self._best_rows(tree, leaves, width, sampling)
        return add_children(tree, leaves, best_2QW, width, sampling)

    def expand_tree(self, tree: TokenTree, expansion: Expansion, sampling: DraftSampling) -> int:
        before, limit = len(tree), self.num_forwards + expansion.num_forwards
        by_score = expansion.by_score
        again = by_score and sampling.costs is not None
        while self.num_forwards < limit:
            left = min(expansion.width, expansion.max_rows - (len(tree) - before))
            rows = self._rows_to_continue(tree, left, by_score, again) if left else []
            if not rows:
                break
            best_2QW = self._best_rows(tree, rows, left, sampling)
            self._root_waits = again = False
            if by_score:
                add_children(tree, rows, best_2QW, left, sampling)
                sampling = sampling.later
                continue
            for row, best_2W in zip(rows, best_2QW.unbind(1), strict=True):
                share = left // len(rows)
                add_children(tree, [row], best_2W[:, None], share, sampling)
        return len(tree) - before

    def _rows_to_continue(
        self, tree: TokenTree, width: int, by_score: bool, again: bool = False
    ) -> list[int]:
        """Return the rows to continue, which are the best new rows, and the root after a commit.

        ``again`` includes rows with children not worth their cost in an earlier step. These
        rows are not recomputed, and their best child may be this step's free first row.
        """
        self._adopt_fresh()
        known, rows = {0, *self._known}, range(1, len(tree))
        # A new row waits for its parent's output, a child of the root for the root's new state.
        ready = known - {0} if self._root_waits else known
        waiting = [row for row in rows if row not in known and tree.parents[row] in ready]
        if again:
            waiting += [row for row in rows if row in known and not tree.children(row)]
        if by_score:
            waiting.sort(key=lambda row: -tree.scores[row])
        else:
            width -= self._root_waits  # every continued row gets a child
        return [0] * self._root_waits + sorted(waiting[:width])

    # -- fresh trees ------------------------------------------------------------------------

    def grow_tree(
        self, tree: TokenTree, shape: TreeShape, *, by_score: bool, sampling: DraftSampling
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
            self._deepen(fresh, [0], shape.depth - 1, top_k)
            chosen = fresh.best(shape.most)
            chosen = chosen[: sampling.worth(tree, [fresh.tree.scores[row] for row in chosen])]
        return fresh.merge(tree, chosen if by_score else sorted(chosen))

    def deepen_tree(self, tree: TokenTree, levels: int, num_tokens: int) -> int:
        fresh = self._fresh
        if fresh is None or not fresh.draft_tokens:
            return 0
        # The width the tree was drafted with, so deeper levels match EAGLE-2's.
        top_k = len(fresh.tree.children(0))
        self._deepen(fresh, self._beams(fresh, top_k), levels - 1, top_k)
        unmerged = [row for row in fresh.best() if row not in fresh.merged][:num_tokens]
        count = fresh.sampling.worth(tree, [fresh.tree.scores[row] for row in unmerged])
        return fresh.merge(tree, unmerged[:count])

    def _beams(self, fresh: _FreshTree, top_k: int) -> list[int]:
        return sorted(deepest_rows(fresh.tree), key=lambda row: -fresh.tree.scores[row])[:top_k]

    def _deepen(self, fresh: _FreshTree, parents: list[int], levels: int, top_k: int) -> None:
        """Grow as EAGLE-2 does, k children per row, then below the k best rows of each level."""
        graph = self._graph_rows
        if graph is None or isinstance(fresh.sampling.rule, RecursiveVerifier):
            self._expand(fresh, parents, top_k)
            for _ in range(levels):
                self._expand(fresh, self._beams(fresh, top_k), top_k)
            return
        query = ChildQuery(top_k, levels, top_k, top_k, sampling=fresh.sampling)
        flat = self._query(graph, fresh.tree, parents, query)
        for level in graph.levels(flat, len(parents), query):
            rows = [
                fresh.tree.add(parent, int(token), score)
                for parent, *best in zip(parents, *level.best_2QW.tolist(), strict=True)
                for token, score in zip(*best, strict=True)
            ]
            parents = [rows[place] for place in level.beams]
            graph.extend([self._name(fresh.tree, row) for row in parents])

    def _expand(self, fresh: _FreshTree, parents: list[int], top_k: int) -> None:
        for parent, children in self._children(fresh, parents, top_k).items():
            for child in children:
                fresh.tree.add(parent, *child)

    def _draft_static(self, fresh: _FreshTree, paths: tuple[tuple[int, ...], ...]) -> None:
        rows: dict[tuple[int, ...], int] = {(): 0}
        for level in range(1, max(map(len, paths)) + 1):
            here = [path for path in paths if len(path) == level]
            parents = list(dict.fromkeys(rows[path[:-1]] for path in here))
            children = self._children(fresh, parents, 1 + max(path[-1] for path in here))
            for path in here:
                parent = rows[path[:-1]]
                rows[path] = fresh.tree.add(parent, *children[parent][path[-1]])

    def _children(
        self, fresh: _FreshTree, parents: list[int], width: int
    ) -> dict[int, list[_Child]]:
        """Return ``width`` children per row, the best ones or a sample without replacement."""
        tree, rule = fresh.tree, fresh.sampling.rule
        if isinstance(rule, RecursiveVerifier):
            logits_RU = self._logits(tree, parents)
            return self._draw_children(fresh, parents, logits_RU, width, rule)
        tokens, scores = self._best(tree, parents, width, fresh.sampling).tolist()
        return {
            parent: [(int(token), score, None) for token, score in zip(*children, strict=True)]
            for parent, *children in zip(parents, tokens, scores, strict=True)
        }

    def _draw_children(
        self,
        fresh: _FreshTree,
        parents: list[int],
        logits_RU: Tensor,
        width: int,
        rule: RecursiveVerifier,
    ) -> dict[int, list[_Child]]:
        """Sample children and score them by rank, because selection must not depend on tokens."""
        # All parents are on one level; one position keys the random numbers of all of them.
        (position,) = {fresh.tree.position(parent) + 1 for parent in parents}
        attempt = fresh.sampling.attempt
        drawn = rule.draw_children(logits_RU, self.draft_ids, position, width, attempt=attempt)
        tokens_RW, q_RV = drawn
        q_RV = torch.nn.functional.pad(q_RV, (0, self.draft.target_vocab_size - q_RV.shape[1]))
        found = {}
        for parent, tokens_W, q_V in zip(parents, tokens_RW, q_RV, strict=True):
            found[parent] = [
                (token, fresh.tree.scores[parent] + rule.score(rank), q_V)
                for rank, token in enumerate(tokens_W.tolist())
            ]
        return found


class CacheSource(TreeSource):
    """Draft source with its rows in one ``RowCache``.

    A subclass creates ``_rows`` before it calls ``super().__init__``.
    """

    _rows: RowCache

    def _restart(self) -> None:
        super()._restart()
        self._rows.restart()

    @property
    def _outputs(self) -> Mapping[int, Tensor]:
        return self._rows.outputs

    @property
    def _known(self) -> Collection[int]:
        return self._rows.known

    @property
    def _graph_rows(self) -> GraphRows | None:
        return self._rows if isinstance(self._rows, GraphRows) else None

    def _rename_rows(self, names: Mapping[int, int]) -> None:
        self._rows.rename(names)


class TextSource(TreeSource):
    """Draft source that reads only tokens, up to the root.

    Results for accepted draft tokens are retained as text.
    """

    reads_features = False

    def _restart(self) -> None:
        super()._restart()
        self._num_taken_in = 0
        """Number of the next observed tokens already turned into text by a ``KeepRows``."""

    def begin(self, features: Features, tokens: list[int]) -> None:
        self._restart()
        self._pending.tokens += tokens

    def observe(self, features: Features, next_tokens: list[int]) -> None:
        self._pending.tokens += next_tokens[self._num_taken_in :]
        self._num_taken_in = 0


class RowsSource(CacheSource, TextSource):
    """Draft source that reads only tokens, with its rows in one ``RowCache``.

    No row is computed twice, except in fresh trees, because they ignore rows in the session's tree.
    """

    def __init__(self, draft: Any) -> None:
        self._rows = make_rows(draft, self, next(draft.parameters())[:0])
        super().__init__(draft)

    def _keep_rows(self, keep: KeepRows) -> None:
        """Rename accepted rows and the new root to text. The old root is text already."""
        path, retained = keep.rows[1 : keep.num_committed + 1], keep.rows[keep.num_committed :]
        computed = [row for row in path if row in self._known]
        self._num_taken_in = len(computed)
        names = {row: place for place, row in enumerate(retained) if place}
        self._rows.rename(names | dict.fromkeys(computed, TEXT))
