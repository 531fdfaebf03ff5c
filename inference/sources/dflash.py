"""DFlash head at decode time, with one forward pass for each block of draft tokens."""

# A text rows with spare ones, R rows and S draft tokens per block, C cache places, D depths read
# Q rows to continue, W best tokens per row, U draft vocabulary, H hidden

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...models.heads.dflash import DFlash
from ...models.speed.cuda_graphs import Packing, borrow_for, padded_rows
from ...models.target import KeepRows
from ...models.transformer.layers import KeyValues
from ..tree import TokenTree
from .base import DraftSampling, Expansion
from .graph_rows import CHUNK_ROWS, MAX_ROWS
from .row_cache import GraphText, NewText
from .tree_source import TreeSource


class DFlashSource(TreeSource):
    """Takes draft tokens from the block at the root, until the root changes.

    Every row is continued from its depth's marginal distribution, whatever its tokens are. A chain
    takes the best token per depth. A tree takes several, and no level needs a pass of its own.
    Trees deeper than a block use more masked positions than in training.
    """

    def __init__(self, draft: DFlash) -> None:
        self._blocks: GraphBlocks | None = None
        if draft.fc.weight.device.type == "cuda":
            self._blocks = borrow_for(draft, self, "blocks", partial(GraphBlocks, draft))
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
        """Outputs for the token after each depth; the first one is for the token after the root."""
        self._states = {}
        self._scored: tuple[object, Tensor] | None = None
        """On a GPU: scoring key, and the best tokens [2, D, W] read with it."""

    def expand_tree(self, tree: TokenTree, expansion: Expansion, sampling: DraftSampling) -> int:
        """Grow the tree by levels. One pass computes the block for all levels."""
        more = replace(expansion, num_forwards=expansion.num_forwards + 1)
        return super().expand_tree(tree, more, sampling)

    def _root_output(self, tree: TokenTree) -> Tensor:
        return self._output(tree, 0)

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        self._states |= {self._name(tree, row): self._output(tree, row) for row in rows}

    def _output(self, tree: TokenTree, row: int) -> Tensor:
        return self._behind(tree, tree.depths[row])

    def _behind(self, tree: TokenTree, depth: int) -> Tensor:
        """Return the block's output [H] for the token after a depth. The root has depth 0."""
        known = 0 if self._block_SH is None else len(self._block_SH)
        if depth >= known:
            size = self.draft.config.num_tokens
            # In multiples of the trained size: on a GPU each number of rows has its own graph.
            more_SH = self._propose(tree, size * (depth // size + 1))
            # Keep the outputs from a block of the trained size.
            old = [] if self._block_SH is None else [self._block_SH]
            self._block_SH = torch.cat([*old, more_SH[known:]])
        assert self._block_SH is not None
        return self._block_SH[depth]

    def _propose(self, tree: TokenTree, num_tokens: int) -> Tensor:
        """Run one forward pass over newly committed tokens and the block at the root."""
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
        self, tree: TokenTree, rows: list[int], width: int, sampling: DraftSampling
    ) -> Tensor:
        if self._blocks is None:
            return super()._best(tree, rows, width, sampling)
        self._compute(tree, [row for row in rows if row])
        depths = [tree.depths[row] for row in rows]
        tokens_QW, own_QW = self._read(tree, max(depths) + 1, width, sampling)[:, depths, :width]
        scores_Q = torch.tensor([tree.scores[row] for row in rows], dtype=torch.float64)
        return torch.stack([tokens_QW, own_QW + scores_Q[:, None]])

    def _read(
        self, tree: TokenTree, num_depths: int, width: int, sampling: DraftSampling
    ) -> Tensor:
        """Return the best tokens after at least ``num_depths`` depths, [2, D, W] on the host."""
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

    def _keep_rows(self, keep: KeepRows) -> None:
        """Forget the block, because the new root's block will have read more tokens."""
        self._forget_block()


class GraphBlocks(GraphText):
    """Proposes DFlash's blocks with CUDA graphs.

    Block rows are written after the text rows, and dropped after use. One forward pass gives all
    depths' marginals, so the host reads them together.
    """

    def __init__(self, draft: DFlash) -> None:
        super().__init__(len(draft.layers), draft.draft_ids)
        self.draft = draft
        self._num_depths = self._width = 0
        """Largest requests so far; later reads request as much at once."""

    def propose(self, text: NewText, token: int, num_rows: int) -> Tensor:
        """Return a block's hidden states as in ``DFlash.propose``, in a reused buffer [S, H]."""
        while len(text.tokens) > MAX_ROWS:
            # Only fills the cache: one block row is the least, and nothing reads its output.
            self._call(text.split(CHUNK_ROWS), token, 1)
        return self._call(text, token, num_rows)

    def _call(self, text: NewText, token: int, num_rows: int) -> Tensor:
        first, count = self._num_text, len(text.tokens)
        A, end = padded_rows(count), first + count
        # Before packing: growing moves the spare places.
        self._reserve(end + num_rows, 1)
        self._num_text = end
        places, sources = text.gathered(self.draft.taps)
        packing = Packing(counts=2, token=1, features=A * len(places), slots=A)
        packed = packing.pack(
            counts=[first, end],
            token=[token],
            # Padding gathers row 0: any valid index will do, as nothing reads the result.
            features=[x for part in places.values() for x in part + [0] * (A - count)],
            # Padding rows write behind all places, where no row looks.
            slots=[*range(first, end)] + [self._num_places] * (A - count),
        )
        compute = partial(self._compute, packing, A, num_rows)
        can_capture = num_rows > 1
        return self.graphs.run((A, num_rows), packed, sources, compute, can_capture=can_capture)

    def _compute(
        self, packing: Packing, A: int, R: int, packed: Tensor, given_PH: Tensor | None
    ) -> Tensor:
        """Run the whole call on fixed input buffers, and return a new buffer."""
        x, draft = packing.unpack(packed), self.draft
        first, end = x["counts"].split(1)
        columns_C = torch.arange(self._num_places + self._num_spare, device=packed.device)
        block_R = end + columns_C[:R]
        feature_AH = draft.fc.weight.new_zeros(0, len(draft.fc.weight))
        if given_PH is not None and A:
            picked = given_PH.index_select(0, x["features"]).chunk(len(draft.taps))
            feature_AH = draft.feature(dict(zip(draft.taps, picked, strict=True)))
        for cache in self._caches:
            cache.slots_R = torch.cat([x["slots"], block_R])
        return draft.fill_block(
            x["token"],
            R,
            feature_AH,
            positions=torch.cat([first + columns_C[:A], block_R]),
            caches=self._caches,
            # Not causal: a block's rows see each other in both directions.
            visible_RC=(columns_C < end + R).expand(R, -1),
        )

    def best(
        self, states_SH: Tensor, num_depths: int, width: int, position: int, sampling: DraftSampling
    ) -> Tensor:
        """Return the best tokens and log-probabilities of each depth, float64 [2, D, W], CPU.

        D and W may be larger than requested. ``position`` is the position of the first depth's
        token. The host waits here, once.
        """
        self._num_depths = max(self._num_depths, num_depths)
        self._width = max(self._width, width)
        states_DH, W = states_SH[: self._num_depths], min(self._width, len(self.ids_U))
        D = len(states_DH)
        noise_DU = sampling.rule.noise_rows(self.ids_U, range(position, position + D))
        packed = torch.zeros(1, dtype=torch.int64)
        if noise_DU is not None:
            # The packed buffer has integers, so noise travels as its bits.
            packed = noise_DU.view(torch.int64).flatten()
        key = sampling.graph_key
        compute = partial(self._ranked, D, W, sampling, noise_DU is not None)
        found = self.graphs.run(
            (D, W, key), packed, [states_DH], compute, can_capture=key is not None
        )
        return found.cpu()

    def _ranked(
        self,
        D: int,
        W: int,
        sampling: DraftSampling,
        has_noise: bool,
        packed: Tensor,
        states_PH: Tensor | None,
    ) -> Tensor:
        assert states_PH is not None, "every depth has one"
        noise_DU = packed.view(torch.float64).view(D, -1) if has_noise else None
        scores_DU = sampling.child_scores(self.draft.logits(states_PH[:D]), noise_DU)
        best_DW, index_DW = scores_DU.topk(W, -1)
        # Ids stay exact in float64, and one transfer to the host carries both.
        return torch.stack([self.draft.draft_ids[index_DW].double(), best_DW.double()])
