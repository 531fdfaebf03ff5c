"""DSpark head at decode time. It combines DFlash's block with each row's own token."""

import torch
from torch import Tensor

from ..tree import TokenTree
from .base import DraftSampling
from .dflash import DFlashSource
from .tree_source import TreeSource


class DSparkSource(DFlashSource):
    """Continues a row by the block's output at its depth and by its own token.

    Every tree row has its own distribution, although one pass serves all rows.
    """

    def _output(self, tree: TokenTree, row: int) -> Tensor:
        # The block's output is shared by a depth; the row's own token tells its rows apart.
        state_H = super()._output(tree, row)
        token = torch.tensor(tree.tokens[row], device=state_H.device)
        return self.draft.behind(state_H, token)

    def _best(
        self, tree: TokenTree, rows: list[int], width: int, sampling: DraftSampling
    ) -> Tensor:
        """Rank row by row, also on a GPU, because the best tokens depend on the row's own token."""
        return TreeSource._best(self, tree, rows, width, sampling)
