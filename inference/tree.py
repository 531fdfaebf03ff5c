"""Ordered token tree of the controller, with the pending root and its draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..models.target import KeepRows, Segment


class TokenTree:
    """Token rows in pipeline order. Row 0 is the pending root.

    The root is an output token that no stage has committed yet. Every other row is a draft token
    below it. Between KeepRows, rows are append-only, parents precede children, and siblings have
    different tokens. Key-value rows in every stage use the same order.
    """

    def __init__(self, root_token: int, root_position: int) -> None:
        self.root_position = root_position
        self.tokens = [root_token]
        self.parents = [-1]
        self.depths = [0]
        """Distance from the root."""
        self.scores = [0.0]
        """Cumulative draft log-probability, 0 at the root."""
        self.draft_probabilities: list[Tensor | None] = [None]
        """q over the target's vocabulary, for rows sampled from it."""
        self.num_injected = 0
        """Rows [0, num_injected) have been sent to the pipeline."""
        self._children: list[dict[int, int]] = [{}]
        self._ancestors = np.zeros((16, 16), dtype=bool)
        self._num_filled = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float, q: Tensor | None = None) -> int:
        """Add a draft token below ``parent`` unless it exists there, and return its row."""
        # Siblings stay distinct, or a verified token would fit two rows.
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
        """Drop all rows after the first ``count``."""
        for row in range(count, len(self)):
            del self._children[self.parents[row]][self.tokens[row]]
        for column in (self.tokens, self.parents, self.depths, self.scores, self._children):
            del column[count:]
        del self.draft_probabilities[count:]
        # Rows behind are filled again on demand, from their new parents.
        self._num_filled = min(self._num_filled, count)

    def child(self, row: int, token: int) -> int | None:
        return self._children[row].get(token)

    def children(self, row: int) -> list[int]:
        return list(self._children[row].values())

    def position(self, row: int) -> int:
        """Return the absolute position in the sequence."""
        return self.root_position + self.depths[row]

    def positions(self, start: int, stop: int) -> Tensor:
        return torch.tensor(self.depths[start:stop], dtype=torch.int64) + self.root_position

    def visible(self, start: int, stop: int) -> Tensor:
        """Return bool [stop - start, stop]: True for a row's ancestors and the row itself."""
        # A copy: the matrix changes in place while this segment is still in flight.
        return torch.from_numpy(self._ancestor_matrix()[start:stop, :stop].copy())

    def ancestors(self, rows: Sequence[int], others: Sequence[int]) -> Tensor:
        """Return bool [R, O]: True if ``others[o]`` is an ancestor of ``rows[r]`` or equal."""
        places = {other: place for place, other in enumerate(others)}
        found = np.zeros((len(rows), len(others)), dtype=bool)
        for index, row in enumerate(rows):
            # Walks up from each row: a few steps, where the matrix would cost O(rows^2).
            while row >= 0:
                if row in places:
                    found[index, places[row]] = True
                row = self.parents[row]
        return torch.from_numpy(found)

    def _ancestor_matrix(self) -> np.ndarray:
        """Fill and return the ancestor matrix of all rows. A draft's large tree never needs it."""
        count = len(self)
        if count > len(self._ancestors):
            # Doubling: growing by one row at a time would copy the matrix every time.
            more = max(count, 2 * len(self._ancestors)) - len(self._ancestors)
            self._ancestors = np.pad(self._ancestors, (0, more))
        matrix = self._ancestors
        for row in range(self._num_filled, count):
            if row:
                # Parents precede children, so the parent's line is complete.
                matrix[row, :row] = matrix[self.parents[row], :row]
            matrix[row, row] = True
        self._num_filled = count
        return matrix

    def segment(self, start: int, stop: int) -> Segment:
        """Return rows [start, stop) as pipeline input."""
        return Segment(
            positions=self.positions(start, stop),
            visible=self.visible(start, stop),
            ids=torch.tensor(self.tokens[start:stop], dtype=torch.int64),
        )

    def keep_for(self, path: list[int], next_token: int) -> KeepRows:
        """Return KeepRows to commit ``path`` and retain the subtree at ``next_token``, if any."""
        child = self.child(path[-1], next_token)
        retained: list[int] = []
        if child is not None:  # its descendants and itself
            retained = np.flatnonzero(self._ancestor_matrix()[: len(self), child]).tolist()
        return KeepRows(rows=(*path, *retained), num_committed=len(path))

    def reroot(self, keep: KeepRows) -> TokenTree:
        """Return a tree of the retained rows in a KeepRows. The first one becomes the root."""
        rows = list(keep.rows[keep.num_committed :])
        root = rows[0]
        place = {row: index for index, row in enumerate(rows)}
        tree = TokenTree(self.tokens[root], self.position(root))
        tree.tokens = [self.tokens[row] for row in rows]
        # Only the new root's parent is missing: it was committed.
        tree.parents = [place.get(self.parents[row], -1) for row in rows]
        tree.depths = [self.depths[row] - self.depths[root] for row in rows]
        tree.scores = [self.scores[row] - self.scores[root] for row in rows]
        tree.draft_probabilities = [self.draft_probabilities[row] for row in rows]
        # Retained rows are in order, so the injected ones come first.
        tree.num_injected = sum(1 for row in rows if row < self.num_injected)
        tree._children = [
            {token: place[child] for token, child in self._children[row].items()}
            for row in rows
            # The ancestor matrix is a submatrix of the old one: no row has to be recomputed.
        ]
        size = max(16, len(rows))
        tree._ancestors = np.zeros((size, size), dtype=bool)
        tree._ancestors[: len(rows), : len(rows)] = self._ancestor_matrix()[np.ix_(rows, rows)]
        tree._num_filled = len(rows)
        return tree
