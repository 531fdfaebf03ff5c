"""The early-exit head behind the first stage."""

# P newly committed rows, R new rows of the tree, C all rows of a cache, H hidden, Q leaves
# U draft vocabulary

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.sources.base import DraftSource, Growth, Sampling, add_layer, deepest_rows
from pipedraft.inference.sources.tree_source import TEXT, RowCache
from pipedraft.inference.tree import TokenTree
from pipedraft.models.layers import KeyValues
from pipedraft.models.target import Keep


class PPSDSource(DraftSource):
    """Reads each row once, when it has passed the first stage.

    A row in flight is to the head what it will be as committed text, so keys and values move from
    the tree to the text with the row, and a step forwards the newest rows only.
    """

    grows: tuple[Growth, ...] = ("layers",)

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.taps = draft.taps
        self.num_forwards = 0
        self._reset()

    def _reset(self) -> None:
        num_layers = self.draft.config.num_layers
        self._rows = RowCache(num_layers)
        self._num_moved = 0

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._reset()
        self.observe(features, tokens[1:])

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        """Computes the rows that were committed before the head had read them: the prompt's."""
        stream_PH = features[self.draft.exit_layer][self._num_moved :]
        self._num_moved = 0
        if not len(stream_PH):
            return
        first, num_rows = self._rows.num_text, len(stream_PH)
        self._forward(TokenTree(0, 0), [], stream_PH, list(range(first, first + num_rows)))

    def keep(self, keep: Keep) -> None:
        path, retained = keep.rows[: keep.num_committed], keep.rows[keep.num_committed :]
        self._num_moved = sum(row in self._rows.outputs for row in path)
        names = {row: place for place, row in enumerate(retained)}
        self._rows.rename(names | dict.fromkeys(path, TEXT))

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
    ) -> int:
        """Adds nothing while the deepest rows have not passed the first stage."""
        leaves, stream_H = deepest_rows(tree), features.get(self.draft.exit_layer)
        if stream_H is None or len(stream_H) <= leaves[-1]:
            return 0
        needed = tree.visible(0, len(tree))[leaves].any(0).nonzero()[:, 0].tolist()
        # A leaf that got no child the last time it was deepest has its output already.
        new = [row for row in needed if row not in self._rows.outputs]
        if new:
            self.num_forwards += 1
            self._forward(tree, new, stream_H[new], [tree.position(row) for row in new])
        logits_QU = self.draft.logits(torch.stack([self._rows.outputs[row] for row in leaves]))
        return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)

    def _forward(
        self, tree: TokenTree, rows: list[int], stream_RH: Tensor, positions: list[int]
    ) -> None:
        """Rows of the tree, or without any the next rows of the text."""
        device = stream_RH.device

        def forward(caches: list[KeyValues], visible_RC: Tensor) -> Tensor:
            return self.draft.rows(
                stream_RH,
                positions_R=torch.tensor(positions, device=device),
                caches=caches,
                visible_RC=visible_RC.to(device),
            )

        self._rows.compute(tree, rows, forward, num_text=len(positions) - len(rows))
