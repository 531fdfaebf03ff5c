"""What a draft has computed for the committed text and for rows of the token tree."""

# R new rows of the tree after A of the text, C cached rows with them, H hidden

import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipedraft.inference.tree import TokenTree
from pipedraft.models.layers import KeyValues

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
