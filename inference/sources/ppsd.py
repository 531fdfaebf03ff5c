"""PPSD's early-exit head at decode time, behind the first stage."""

# P newly committed rows, R new tree rows, C all cache rows, H hidden, Q leaves
# U draft vocabulary

import torch
from torch import Tensor

from ...models.heads.draft_calls import call
from ...models.heads.ppsd import PPSD
from ...models.target import KeepRows
from ...models.transformer.layers import KeyValues
from ..tree import TokenTree
from .base import (
    DraftSampling,
    DraftSource,
    Features,
    Growth,
    add_children,
    add_layer,
    deepest_rows,
)
from .graph_call import ChildQuery, GraphCall
from .graph_rows import GraphRows, make_rows
from .row_cache import TEXT, NewText


class PPSDSource(DraftSource):
    """Reads each row once, after the first stage.

    A row's keys and values move with it from the tree to the text, because its input stays the
    same. So a step forwards only the newest rows.
    """

    grows: tuple[Growth, ...] = ("layers",)

    def __init__(self, draft: PPSD) -> None:
        self.draft = draft
        self.taps = draft.taps
        self.num_forwards = 0
        self._rows = make_rows(draft, self, draft.lm_head.weight[:0])
        self._reset()

    def _reset(self) -> None:
        self._rows.restart()
        self._num_moved = 0

    def begin(self, features: Features, tokens: list[int]) -> None:
        self._reset()
        self.observe(features, tokens[1:])

    def observe(self, features: Features, next_tokens: list[int]) -> None:
        """Compute the rows that were committed before the head read them (the prompt's)."""
        stream_PH = features[self.draft.exit_layer][self._num_moved :]
        self._num_moved = 0
        if not len(stream_PH):
            return
        first, num_rows = self._rows.num_text, len(stream_PH)
        if isinstance(self._rows, GraphRows):
            text = NewText([0] * num_rows, [{self.draft.exit_layer: stream_PH}])
            self._rows.grow(GraphCall(tree=TokenTree(0, first + num_rows), text=text))
            return
        self._forward(TokenTree(0, 0), [], stream_PH, list(range(first, first + num_rows)))

    def keep(self, keep: KeepRows) -> None:
        path, retained = keep.rows[: keep.num_committed], keep.rows[keep.num_committed :]
        # Computed rows on the path are text already; observe gets their states next and skips them.
        self._num_moved = sum(row in self._rows.known for row in path)
        names = {row: place for place, row in enumerate(retained)}
        self._rows.rename(names | dict.fromkeys(path, TEXT))

    def grow_layer(
        self, tree: TokenTree, features: Features, *, width: int, sampling: DraftSampling
    ) -> int:
        """Add nothing until the deepest rows have passed the first stage."""
        leaves, stream_H = deepest_rows(tree), features.get(self.draft.exit_layer)
        # Rows advance in tree order: if the last leaf has passed, so have all its ancestors.
        if stream_H is None or len(stream_H) <= leaves[-1]:
            return 0
        needed = tree.visible(0, len(tree))[leaves].any(0).nonzero()[:, 0].tolist()
        # A leaf left childless by an earlier call has its output already.
        new = [row for row in needed if row not in self._rows.known]
        self.num_forwards += bool(new)
        if isinstance(self._rows, GraphRows):
            query = ChildQuery() if sampling.samples_chain else ChildQuery(width, sampling=sampling)
            found = self._rows.grow(
                GraphCall(
                    tree=tree,
                    text=NewText([], []),
                    rows=new,
                    leaves=leaves,
                    query=query,
                    given={self.draft.exit_layer: stream_H},
                )
            )
            if sampling.samples_chain:
                return add_layer(tree, found, self.draft, width=width, sampling=sampling)
            (level,) = self._rows.levels(found, len(leaves), query)
            return add_children(tree, leaves, level.best_2QW, width, sampling)
        if new:
            self._forward(tree, new, stream_H[new], [tree.position(row) for row in new])
        outputs_QH = torch.stack([self._rows.outputs[row] for row in leaves])
        logits_QU = call(self.draft.logits, outputs_QH)
        return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)

    def _forward(
        self, tree: TokenTree, rows: list[int], stream_RH: Tensor, positions: list[int]
    ) -> None:
        """Forward tree rows, or the next text rows if there are no tree rows."""
        device = stream_RH.device

        def forward(caches: list[KeyValues], visible_RC: Tensor) -> Tensor:
            return call(
                self.draft.rows,
                stream_RH,
                positions_R=torch.tensor(positions, device=device),
                caches=caches,
                visible_RC=visible_RC.to(device),
            )

        self._rows.compute(tree, rows, forward, num_text=len(positions) - len(rows))
