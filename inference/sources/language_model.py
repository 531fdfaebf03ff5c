"""An independent language model as the draft, at decode time."""

# H hidden of the draft

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.sources.tree_source import TreeSource
from pipedraft.inference.tree import TokenTree
from pipedraft.models.target import Keep, Segment

CHUNK_ROWS = 512  # rows of one forward pass over the prompt; bounds its mask


class LanguageModelSource(TreeSource):
    """Guesses of a causal LM that reads the text alone.

    The LM is a target of one stage: the text, the pending root included, is committed in its cache
    and the guesses are speculative rows there. A guess that becomes text is committed with a Keep,
    so what was computed once is never computed again.
    """

    def __init__(self, draft: Any) -> None:
        super().__init__(draft)
        staged = draft.staged()
        self.is_chain_only = staged.is_chain_only
        (self._stage,) = staged.stages
        self._reset([])

    def _reset(self, tokens: list[int]) -> None:
        self._stage.reset()
        self._pending = tokens
        """Committed text that the LM has not seen yet."""
        self._root_hidden: Tensor | None = None
        self._num_taken_in = 0
        """Of the next tokens to be observed: those whose rows a Keep has committed already."""
        self._hidden: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}
        """Row of the tree -> its place among the speculative rows."""
        self._fresh = None

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._reset(list(tokens))

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        """Taken in with the next growth: text that nobody continues costs nothing."""
        self._pending += next_tokens[self._num_taken_in :]
        self._num_taken_in = 0

    @property
    def _outputs(self) -> Mapping[int, Tensor]:
        return self._hidden

    def _root_output(self) -> Tensor:
        if self._pending:
            ids = torch.tensor(self._pending)
            positions = torch.arange(len(ids)) + self._stage.num_committed
            for part in zip(ids.split(CHUNK_ROWS), positions.split(CHUNK_ROWS), strict=True):
                hidden_RH, _ = self._stage.prefill(*part)
            self._root_hidden, self._pending = hidden_RH[-1], []
            self.num_forwards += 1
        assert self._root_hidden is not None
        return self._root_hidden

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        first = len(self._places)
        self._places.update({row: first + index for index, row in enumerate(rows)})
        cached = sorted(self._places, key=self._places.__getitem__)
        segment = Segment(
            positions=torch.tensor([tree.position(row) for row in rows]),
            visible=tree.ancestors(rows, cached),
            ids=torch.tensor([tree.tokens[row] for row in rows]),
        )
        hidden_RH = self._stage.forward(segment).hidden
        assert hidden_RH is not None
        self._hidden.update(zip(rows, hidden_RH, strict=True))
        self.num_forwards += 1

    def _forget_rows(self) -> None:
        self._stage.keep(Keep((), 0))
        self._hidden, self._places = {}, {}

    def _keep_rows(self, keep: Keep) -> None:
        """The old root is committed here already; the new one is text as well."""
        text = keep.rows[1 : keep.num_committed + 1]
        hit = len(keep.rows) > keep.num_committed
        cached = [row for row in keep.rows[1:] if row in self._places]
        # A row is computed after its ancestors, so those that become text come first.
        cached.sort(key=self._places.__getitem__)
        self._num_taken_in = sum(row in self._places for row in text)
        places = tuple(self._places[row] for row in cached)
        self._stage.keep(Keep(places, self._num_taken_in))
        if hit and text[-1] in self._places:
            self._root_hidden = self._hidden[text[-1]]
        renumbered = {row: index for index, row in enumerate(keep.rows[keep.num_committed :])}
        left = [renumbered[row] for row in cached[self._num_taken_in :]]
        hidden = [self._hidden[row] for row in cached[self._num_taken_in :]]
        self._places = {row: place for place, row in enumerate(left)}
        self._hidden = dict(zip(left, hidden, strict=True))
