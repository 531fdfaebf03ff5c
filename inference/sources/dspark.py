"""The DSpark head at decode time: DFlash's block, and for every row the token before it."""

import torch
from torch import Tensor

from pipedraft.inference.sources.base import DraftSampling
from pipedraft.inference.sources.dflash import DFlashSource
from pipedraft.inference.sources.tree_source import TreeSource
from pipedraft.inference.tree import TokenTree


class DSparkSource(DFlashSource):
    """A row continues by the block's output of its depth and by its own token.

    All rows of a tree have distributions of their own, and still take one pass.
    """

    def _output(self, tree: TokenTree, row: int) -> Tensor:
        state_H = super()._output(tree, row)
        token = torch.tensor(tree.tokens[row], device=state_H.device)
        return self.draft.behind(state_H, token)

    def _best(
        self, tree: TokenTree, rows: list[int], width: int, sampling: DraftSampling
    ) -> Tensor:
        """Row by row also on a GPU: what is best behind a depth depends on the row's token."""
        return TreeSource._best(self, tree, rows, width, sampling)
