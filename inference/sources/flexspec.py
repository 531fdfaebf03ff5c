"""FlexSpec's draft at decode time."""

# R rows per call after A text rows, C cached rows, E readings, H hidden
# Q states known before the call: the last text row, then the rows' computed parents

from functools import partial

import torch
from torch import Tensor

from ...models.target import KeepRows
from ...models.transformer.layers import KeyValues
from ..tree import TokenTree
from .tree_source import RowsSource


class FlexSpecSource(RowsSource):
    """Draft tokens from FlexSpec's draft model."""

    def _restart(self) -> None:
        super()._restart()
        config, weight = self.draft.config, self.draft.lm_head.weight
        # The first text row has no predecessor; it reads zeros in its place.
        self._text_state = weight.new_zeros(config.num_readings, weight.shape[1])
        """State of the last text row, [E, H]."""

    def _keep_rows(self, keep: KeepRows) -> None:
        # Before ``super``: it forgets the outputs when rows become text.
        computed = [row for row in keep.rows[1 : keep.num_committed + 1] if row in self._known]
        if computed and self._graph_rows is None:
            self._text_state = self._outputs[computed[-1]]
        super()._keep_rows(keep)

    def _root_output(self, tree: TokenTree) -> Tensor:
        if self._pending.tokens:
            self._compute(tree, [])
        return self._text_state

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        """Run one forward pass over newly committed text, then tree rows."""
        tokens, first = self._take_pending().tokens, self._rows.num_text
        num_text = len(tokens)
        parents = [self._name(tree, tree.parents[row]) for row in rows if tree.parents[row]]
        # Children of the root follow the text, so they read its last state.
        known_QEH = torch.stack([self._text_state, *(self._outputs[name] for name in parents)])
        # Each row's predecessor as an index into these Q known states, then the call's rows.
        num_known, after_root = len(known_QEH), iter(range(1, len(known_QEH)))
        root = num_known + num_text - 1 if num_text else 0
        before = [num_known + row - 1 if row else 0 for row in range(num_text)]
        before += [next(after_root) if tree.parents[row] else root for row in rows]
        positions = [*range(first, first + num_text), *(tree.position(row) for row in rows)]
        ids = [*tokens, *(tree.tokens[row] for row in rows)]

        def forward(caches: list[KeyValues], visible_RC: Tensor) -> Tensor:
            device = known_QEH.device
            return self.draft.rows(
                torch.tensor(ids, device=device),
                positions_R=torch.tensor(positions, device=device),
                caches=caches,
                visible_RC=visible_RC.to(device),
                known_QEH=known_QEH,
                before_R=torch.tensor(before, device=device),
            )

        self.num_forwards += 1
        name = partial(self._name, tree)
        text_AEH = self._rows.compute(tree, rows, forward, num_text=num_text, name=name)
        if num_text:
            self._text_state = text_AEH[-1]
