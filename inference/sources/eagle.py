"""EAGLE heads at decode time.

The head's key-value rows of committed positions are kept and only extended. What it computed for
guesses below the root is dropped when they are committed, because the target's true states replace
it.
"""

# R rows of a call, C cached rows, H hidden

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.sources.row_cache import RowCache
from pipedraft.inference.sources.tree_source import TreeSource
from pipedraft.inference.tree import TokenTree
from pipedraft.models.key_values import KeyValues
from pipedraft.models.target import Keep


class EagleSource(TreeSource):
    """Guesses of an EAGLE head.

    Rows of the session's tree that are continued stay as they were drafted, while the committed
    ones below them are refreshed with the target's states.
    """

    def __init__(self, draft: Any) -> None:
        super().__init__(draft)
        self.taps = draft.taps
        self._reset()

    def _reset(self) -> None:
        self._committed = KeyValues()
        self._pending: list[tuple[Mapping[int, Tensor], list[int]]] = []
        self._root_state: Tensor | None = None
        self._start_over()

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._reset()
        self.observe(features, tokens[1:])

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        """Taken in with the next growth: text that nobody continues costs nothing."""
        self._pending.append((features, next_tokens))

    def _forget_rows(self) -> None:
        self._rows = RowCache(1)

    def _keep_rows(self, keep: Keep) -> None:
        """Forget the rows that left the tree, and the new root's: its true state follows."""
        retained = keep.rows[keep.num_committed :]
        self._rows.renumber({row: place for place, row in enumerate(retained) if place})

    @property
    def _outputs(self) -> Mapping[int, Tensor]:
        return self._rows.outputs

    def _root_output(self) -> Tensor:
        if self._pending:
            features = [self.draft.feature(taps) for taps, _ in self._pending]
            tokens = [token for _, part in self._pending for token in part]
            self._pending = []
            first = self._committed.num_rows
            visible = torch.ones(len(tokens), first + len(tokens), dtype=torch.bool).tril(first)
            positions = range(first, first + len(tokens))
            states = self._forward(tokens, torch.cat(features), positions, self._committed, visible)
            self._root_state = states[-1]
        assert self._root_state is not None
        return self._root_state

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        # The root is a committed row of the head, which joins a token to the state before it.
        root = self._root_output()
        parents = [tree.parents[row] for row in rows]
        states = [self._outputs[parent] if parent else root for parent in parents]
        tokens = [tree.tokens[row] for row in rows]
        positions = [self._committed.num_rows - 1 + tree.depths[row] for row in rows]

        def forward(caches: list[KeyValues], visible_RC: Tensor) -> Tensor:
            return self._forward(tokens, torch.stack(states), positions, caches[0], visible_RC)

        self._rows.compute(tree, rows, [self._committed], forward)

    def _forward(
        self,
        tokens: Sequence[int],
        states_RH: Tensor,
        positions: Sequence[int],
        cache: KeyValues,
        visible_RC: Tensor,
    ) -> Tensor:
        self.num_forwards += 1
        device = states_RH.device
        return self.draft.rows(
            torch.tensor(tokens, device=device),
            states_RH,
            positions_R=torch.tensor(positions, device=device),
            cache=cache,
            visible_RC=visible_RC.to(device),
        )
