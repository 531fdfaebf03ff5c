"""The DFlash head at decode time: one forward pass for a block of draft tokens."""

# C rows of the text that are new, S draft tokens of a block, Q rows asked about, D depths
# W best tokens of each, H hidden

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pipedraft.inference.sources.base import Expansion, Sampling
from pipedraft.inference.sources.recorded_blocks import RecordedBlocks
from pipedraft.inference.sources.tree_source import Logits, TreeSource
from pipedraft.inference.tree import TokenTree
from pipedraft.models.dflash import DFlash
from pipedraft.models.layers import KeyValues
from pipedraft.models.recorded import lend
from pipedraft.models.target import Keep


class DFlashSource(TreeSource):
    """Draft tokens of the block at the root, until there is another root.

    A row continues by the marginal distribution of its depth, whatever its tokens: a chain takes
    the best ones, a tree several of each depth, and no level needs a pass of its own. Trees deeper
    than a block get rows that training never had: marginals of more masked positions.
    """

    def __init__(self, draft: DFlash) -> None:
        self._blocks: RecordedBlocks | None = None
        if draft.fc.weight.device.type == "cuda":
            self._blocks = lend(draft, self, "blocks", partial(RecordedBlocks, draft))
        super().__init__(draft)
        self.taps = draft.taps

    def _restart(self) -> None:
        super()._restart()
        if self._blocks is not None:
            self._blocks.restart()
        self._caches = [KeyValues() for _ in range(self.draft.config.num_layers)]
        self._forget_block()

    def _forget_block(self) -> None:
        self._block_SH: Tensor | None = None
        """Output behind each depth, the root's first."""
        self._states = {}
        self._scored: tuple[object, Tensor] | None = None
        """What was read of the block on a GPU: how it was scored, and the best tokens [2, D, W]."""

    def expand_tree(self, tree: TokenTree, expansion: Expansion, sampling: Sampling) -> int:
        """Grow the tree by levels; one pass makes the block of all of them."""
        more = replace(expansion, num_forwards=expansion.num_forwards + 1)
        return super().expand_tree(tree, more, sampling)

    def _root_output(self, tree: TokenTree) -> Tensor:
        return self._output(tree, 0)

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        self._states |= {self._name(tree, row): self._output(tree, row) for row in rows}

    def _output(self, tree: TokenTree, row: int) -> Tensor:
        return self._behind(tree, tree.depths[row])

    def _behind(self, tree: TokenTree, depth: int) -> Tensor:
        """Output [H] of the block behind a depth; the root is at 0."""
        known = 0 if self._block_SH is None else len(self._block_SH)
        if depth >= known:
            size = self.draft.config.num_tokens
            more_SH = self._propose(tree, size * (depth // size + 1))
            # What a block of the trained size said stays.
            old = [] if self._block_SH is None else [self._block_SH]
            self._block_SH = torch.cat([*old, more_SH[known:]])
        assert self._block_SH is not None
        return self._block_SH[depth]

    def _propose(self, tree: TokenTree, num_tokens: int) -> Tensor:
        """One forward pass: newly committed text, then the block at the root."""
        self.num_forwards += 1
        weight, text = self.draft.fc.weight, self._take_pending()
        num_rows = num_tokens + self.draft.config.first_row
        if self._blocks is not None:
            return self._blocks.propose(text, tree.tokens[0], num_rows)
        features = [self.draft.feature(taps) for taps in text.features]
        return self.draft.propose(
            torch.tensor(tree.tokens[:1], device=weight.device),
            num_rows,
            torch.cat(features) if features else weight.new_zeros(0, len(weight)),
            position=tree.root_position,
            caches=self._caches,
        )

    def _best(
        self, tree: TokenTree, rows: list[int], width: int, sampling: Sampling, logits: Logits
    ) -> Tensor:
        if self._blocks is None:
            return super()._best(tree, rows, width, sampling, logits)
        self._compute(tree, [row for row in rows if row])
        depths = [tree.depths[row] for row in rows]
        tokens_QW, own_QW = self._read(tree, max(depths) + 1, width, sampling)[:, depths, :width]
        scores_Q = torch.tensor([tree.scores[row] for row in rows], dtype=torch.float64)
        return torch.stack([tokens_QW, own_QW + scores_Q[:, None]])

    def _read(self, tree: TokenTree, num_depths: int, width: int, sampling: Sampling) -> Tensor:
        """Best tokens behind all depths of the block so far: [2, D, W], in the host's memory."""
        assert self._blocks is not None
        self._behind(tree, num_depths - 1)
        assert self._block_SH is not None
        key, width = (sampling.rule, sampling.costs is None), min(width, len(self.draft_ids))
        if self._scored is not None and self._scored[0] == key:
            _, D, W = self._scored[1].shape
            if num_depths <= D and width <= W:
                return self._scored[1]
        position = tree.root_position + 1
        found = self._blocks.best(self._block_SH, num_depths, width, position, sampling)
        self._scored = key, found
        return found

    def _keep_rows(self, keep: Keep) -> None:
        """The block of the new root knows more of the text: every row is continued by it anew."""
        self._forget_block()
