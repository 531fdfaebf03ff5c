"""EAGLE heads at decode time.

Key-value rows for committed positions are retained and extended. Rows computed for draft tokens
below the root are dropped at commit, because the target's true states replace them.
"""

# R rows per call after A text rows, C cached rows, H hidden

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...models.heads.draft_calls import call
from ...models.heads.eagle import EagleHead
from ...models.transformer.layers import KeyValues
from ..tree import TokenTree
from .graph_rows import make_rows
from .row_cache import TEXT, RowCache
from .tree_source import CacheSource


class EagleSource(CacheSource):
    """Draft tokens from an EAGLE head."""

    def __init__(self, draft: EagleHead) -> None:
        like = draft.draft_ids.new_zeros(0, dtype=next(draft.parameters()).dtype)
        # A window needs the age of each cached row on the host.
        can_capture = draft.window is None
        self._rows = make_rows(draft, self, like) if can_capture else RowCache(draft.num_caches)
        super().__init__(draft)
        self.taps = draft.taps

    def _restart(self) -> None:
        super()._restart()
        self._root_state: Tensor | None = None

    def _num_passes(self, tree: TokenTree, has_text: bool, rows: list[int]) -> int:
        # Rows below the root read its state, which the text's own pass computes first.
        below_root = any(tree.parents[row] == 0 for row in rows)
        return has_text + bool(rows) if below_root else super()._num_passes(tree, has_text, rows)

    def _root_output(self, tree: TokenTree) -> Tensor:
        if self._pending.tokens:
            self._take_in(tree, [])
        assert self._root_state is not None
        return self._root_state

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        """Compute rows. Unread text joins the same pass, unless a row needs the text's result."""
        if any(tree.parents[row] == 0 for row in rows):
            self._root_output(tree)
        self._take_in(tree, rows)

    def _take_in(self, tree: TokenTree, rows: list[int]) -> None:
        """Run one forward pass over newly committed text, then tree rows.

        Each token is joined to the state before it. For text this is the target's state, else the
        head's own.
        """
        text = self._take_pending()
        states = [self.draft.feature(taps) for taps in text.features]
        first, num_text = self._rows.num_text, len(text.tokens)
        root = first + num_text - 1
        for row in rows:
            parent = tree.parents[row]
            state = self._outputs[self._name(tree, parent)] if parent else self._root_state
            assert state is not None
            states.append(state[None])
        tokens = [*text.tokens, *(tree.tokens[row] for row in rows)]
        positions = [*range(first, root + 1), *(root + tree.depths[row] for row in rows)]

        def forward(caches: list[KeyValues], visible_RC: Tensor) -> Tensor:
            visible_RC &= self._within_window(tree, positions, root)
            return self._forward(tokens, torch.cat(states), positions, caches, visible_RC)

        name = partial(self._name, tree)
        text_AH = self._rows.compute(tree, rows, forward, num_text=num_text, name=name)
        if num_text:
            self._root_state = text_AH[-1]

    def _within_window(self, tree: TokenTree, positions: list[int], root: int) -> Tensor:
        """Return bool [R, C], True for cached rows within the window (True if there is no window).

        Deviation: chain rows leave the window with age, as in inference engines. The package
        speculators trains with the window of the chain's first row.
        """
        window = self.draft.window
        if window is None:
            return torch.tensor(True)
        in_text, cached = iter(range(self._rows.num_text)), []
        for name in self._rows.names:
            row = self._name(tree, name)  # a row in another tree is invisible, so any place will do
            depth = tree.depths[row] if 0 <= row < len(tree) else 0
            cached.append(next(in_text) if name == TEXT else root + depth)
        return torch.tensor(cached) > torch.tensor(positions)[:, None] - window

    def _forward(
        self,
        tokens: Sequence[int],
        states_RH: Tensor,
        positions: Sequence[int],
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
    ) -> Tensor:
        self.num_forwards += 1
        device = states_RH.device
        return call(
            self.draft.step,
            torch.tensor(tokens, device=device),
            states_RH,
            positions_R=torch.tensor(positions, device=device),
            caches=caches,
            visible_RC=visible_RC.to(device),
        )
