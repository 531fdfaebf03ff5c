"""The controller's ordered token tree: what is pending, what is drafted, who descends from whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipedraft.models.target import KeepRows, Segment


class TokenTree:
    """Rows in the order in which they enter the pipeline; row 0 is the pending root.

    The root is a token of the text that no stage has committed yet. Every other row is a draft
    token below it. Rows are append-only between Keeps, parents come before children, and no parent
    has two children with the same token. The key-value rows of every stage follow the same order.
    """

    def __init__(self, root_token: int, root_position: int) -> None:
        self.root_position = root_position
        self.tokens = [root_token]
        self.parents = [-1]
        self.depths = [0]
        """Distance from the root."""
        self.scores = [0.0]
        """Cumulative log-probability of the draft, 0 at the root."""
        self.draft_probabilities: list[Tensor | None] = [None]
        """q over the target's vocabulary, for rows that were sampled from it."""
        self.num_injected = 0
        """Rows [0, num_injected) have been handed to the pipeline."""
        self._children: list[dict[int, int]] = [{}]
        self._ancestors = np.zeros((16, 16), dtype=bool)
        self._num_filled = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float, q: Tensor | None = None) -> int:
        """Append a draft token below ``parent``; returns its row (the existing one if there)."""
        existing = self._children[parent].get(token)
        if existing is not None:
            return existing
        row = len(self.tokens)
        self._children[parent][token] = row
        self._children.append({})
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        self.draft_probabilities.append(q)
        return row

    def truncate(self, count: int) -> None:
        """Forget all rows but the first ``count``."""
        for row in range(count, len(self)):
            del self._children[self.parents[row]][self.tokens[row]]
        for column in (self.tokens, self.parents, self.depths, self.scores, self._children):
            del column[count:]
        del self.draft_probabilities[count:]
        self._num_filled = min(self._num_filled, count)

    def child(self, row: int, token: int) -> int | None:
        return self._children[row].get(token)

    def children(self, row: int) -> list[int]:
        return list(self._children[row].values())

    def position(self, row: int) -> int:
        """Absolute position in the text."""
        return self.root_position + self.depths[row]

    def positions(self, start: int, stop: int) -> Tensor:
        return torch.tensor(self.depths[start:stop], dtype=torch.int64) + self.root_position

    def visible(self, start: int, stop: int) -> Tensor:
        """Ancestors-or-self among all rows up to ``stop``: bool [stop - start, stop]."""
        return torch.from_numpy(self._ancestor_matrix()[start:stop, :stop].copy())

    def ancestors(self, rows: Sequence[int], others: Sequence[int]) -> Tensor:
        """Whether each of some other rows is an ancestor of a row, or itself: bool [R, O]."""
        places = {other: place for place, other in enumerate(others)}
        found = np.zeros((len(rows), len(others)), dtype=bool)
        for index, row in enumerate(rows):
            while row >= 0:
                if row in places:
                    found[index, places[row]] = True
                row = self.parents[row]
        return torch.from_numpy(found)

    def _ancestor_matrix(self) -> np.ndarray:
        """Ancestors-or-self of every row; filled when it is asked for, as trees that only a draft
        looks at may have many rows and never are."""
        count = len(self)
        if count > len(self._ancestors):
            more = max(count, 2 * len(self._ancestors)) - len(self._ancestors)
            self._ancestors = np.pad(self._ancestors, (0, more))
        matrix = self._ancestors
        for row in range(self._num_filled, count):
            if row:
                matrix[row, :row] = matrix[self.parents[row], :row]
            matrix[row, row] = True
        self._num_filled = count
        return matrix

    def segment(self, start: int, stop: int) -> Segment:
        """Rows [start, stop) as the pipeline's input."""
        return Segment(
            positions=self.positions(start, stop),
            visible=self.visible(start, stop),
            ids=torch.tensor(self.tokens[start:stop], dtype=torch.int64),
        )

    def keep_for(self, path: list[int], next_token: int) -> KeepRows:
        """KeepRows that commits ``path`` (root first) and retains the subtree of ``next_token``.

        Without such a child nothing is retained: a miss.
        """
        child = self.child(path[-1], next_token)
        retained: list[int] = []
        if child is not None:  # its descendants and itself
            retained = np.flatnonzero(self._ancestor_matrix()[: len(self), child]).tolist()
        return KeepRows(rows=(*path, *retained), num_committed=len(path))

    def reroot(self, keep: KeepRows) -> TokenTree:
        """The tree that is left after a KeepRows; the first retained row is the root."""
        rows = list(keep.rows[keep.num_committed :])
        root = rows[0]
        place = {row: index for index, row in enumerate(rows)}
        tree = TokenTree(self.tokens[root], self.position(root))
        tree.tokens = [self.tokens[row] for row in rows]
        tree.parents = [place.get(self.parents[row], -1) for row in rows]
        tree.depths = [self.depths[row] - self.depths[root] for row in rows]
        tree.scores = [self.scores[row] - self.scores[root] for row in rows]
        tree.draft_probabilities = [self.draft_probabilities[row] for row in rows]
        tree.num_injected = sum(1 for row in rows if row < self.num_injected)
        tree._children = [
            {token: place[child] for token, child in self._children[row].items()} for row in rows
        ]
        size = max(16, len(rows))
        tree._ancestors = np.zeros((size, size), dtype=bool)
        tree._ancestors[: len(rows), : len(rows)] = self._ancestor_matrix()[np.ix_(rows, rows)]
        tree._num_filled = len(rows)
        return tree
