"""What a draft has computed for rows of the token tree."""

# R new rows, C committed rows, cached rows of the tree and the new ones, H hidden

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipedraft.inference.tree import TokenTree
from pipedraft.models.key_values import KeyValues


class RowCache:
    """Keys and values of every draft layer, and the output, of rows of the tree.

    A row is computed once and stays until it leaves the tree. It sees the committed rows, which
    are kept elsewhere, and its ancestors-or-self among the cached ones.
    """

    def __init__(self, num_layers: int) -> None:
        self.rows: list[int] = []
        """Row of the tree of each cached row, in the order of the keys and values."""
        self.layers = [KeyValues() for _ in range(num_layers)]
        self.outputs: dict[int, Tensor] = {}
        """Row of the tree -> output [H]."""

    def compute(
        self,
        tree: TokenTree,
        rows: list[int],
        committed: Sequence[KeyValues],
        forward: Callable[[list[KeyValues], Tensor], Tensor],
    ) -> None:
        """Add rows of the tree.

        Args:
            rows: not cached yet; the ancestors of each are cached or committed, or precede it.
            committed: of every layer.
            forward: appends R rows to the caches of all layers, each seeing what the bool [R, C]
                says, and returns their outputs [R, H].
        """
        num_committed = committed[0].num_rows
        self.rows += rows
        ancestors_RR = tree.ancestors(rows, self.rows)
        committed_RC = torch.ones(len(rows), num_committed, dtype=torch.bool)
        joined = [
            before.followed_by(layer) for before, layer in zip(committed, self.layers, strict=True)
        ]
        outputs_RH = forward(joined, torch.cat([committed_RC, ancestors_RR], 1))
        self.layers = [layer.after(num_committed) for layer in joined]
        self.outputs.update(zip(rows, outputs_RH, strict=True))

    def select(self, rows: Sequence[int]) -> list[KeyValues]:
        """Keys and values of some rows of the tree, of every layer."""
        places = [self.rows.index(row) for row in rows]
        return [layer.select(places) for layer in self.layers]

    def renumber(self, places: Mapping[int, int]) -> None:
        """Rows of the tree have moved; those without a new place are forgotten."""
        rows = [row for row in self.rows if row in places]
        self.layers = self.select(rows)
        self.rows = [places[row] for row in rows]
        self.outputs = {places[row]: self.outputs[row] for row in rows}
