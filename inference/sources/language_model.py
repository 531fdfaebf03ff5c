"""Draft model (an independent causal LM) at decode time."""

# H draft hidden

from collections.abc import Mapping

import torch
from torch import Tensor

from ...models.heads.language_model import LanguageModelDraft
from ...models.target import KeepRows, Segment
from ..tree import TokenTree
from .graph_rows import CHUNK_ROWS
from .tree_source import RowsSource, TextSource


class GraphLanguageModelSource(RowsSource):
    """Draft tokens from a causal LM on a GPU, with CUDA graphs as forward passes."""

    def _num_passes(self, tree: TokenTree, has_text: bool, rows: list[int]) -> int:
        return has_text + bool(rows)


class LanguageModelSource(TextSource):
    """Draft tokens from a causal LM, run as a one-stage target.

    The text, including the pending root, is committed in the LM's cache. Draft tokens are
    speculative rows. KeepRows commits accepted draft tokens, so no row is computed twice.
    """

    def __init__(self, draft: LanguageModelDraft) -> None:
        (self._stage,) = draft.staged().stages
        super().__init__(draft)

    def _restart(self) -> None:
        super()._restart()
        self._stage.reset()
        self._root_hidden: Tensor | None = None
        self._places: dict[int, int] = {}
        """Tree row's name -> its place among the speculative rows, in order."""

    def _root_output(self, tree: TokenTree) -> Tensor:
        if self._pending.tokens:
            ids = torch.tensor(self._take_pending().tokens)
            positions = torch.arange(len(ids)) + self._stage.num_committed
            for part in zip(ids.split(CHUNK_ROWS), positions.split(CHUNK_ROWS), strict=True):
                hidden_RH, _ = self._stage.prefill(*part)
            self._root_hidden = hidden_RH[-1]
            # One forward, however many chunks: only memory splits it.
            self.num_forwards += 1
        assert self._root_hidden is not None
        return self._root_hidden

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        # Text first: it must precede the rows that attend to it in the cache.
        self._root_output(tree)
        first = len(self._places)
        new = [self._name(tree, row) for row in rows]
        self._places.update({name: first + index for index, name in enumerate(new)})
        cached = [self._name(tree, name) for name in self._places]
        segment = Segment(
            positions=torch.tensor([tree.position(row) for row in rows]),
            visible=tree.ancestors(rows, cached),
            ids=torch.tensor([tree.tokens[row] for row in rows]),
        )
        hidden_RH = self._stage.forward(segment).hidden
        assert hidden_RH is not None
        self._states.update(zip(new, hidden_RH, strict=True))
        self.num_forwards += 1

    def _rename_rows(self, names: Mapping[int, int], num_committed: int = 0) -> None:
        """Rename computed rows and forget the others. The first ``num_committed`` become text."""
        # KeepRows wants ascending places.
        retained = sorted(self._places.keys() & names.keys(), key=self._places.__getitem__)
        self._stage.keep(KeepRows(tuple(self._places[name] for name in retained), num_committed))
        retained = retained[num_committed:]
        self._states = {names[name]: self._states[name] for name in retained}
        self._places = {names[name]: place for place, name in enumerate(retained)}

    def _keep_rows(self, keep: KeepRows) -> None:
        """Commit accepted rows and the new root as text. The old root is committed already."""
        text = keep.rows[1 : keep.num_committed + 1]
        self._num_taken_in = sum(row in self._places for row in text)
        if len(keep.rows) > keep.num_committed and text[-1] in self._places:
            self._root_hidden = self._states[text[-1]]
        # In KeepRows parents precede children, so rows becoming text come first.
        first = keep.num_committed
        places = {row: place - first for place, row in enumerate(keep.rows) if place}
        self._rename_rows(places, self._num_taken_in)


def language_model_source(draft: LanguageModelDraft) -> TextSource:
    # Not every draft can be captured: graphs need full attention in each layer.
    is_captured = draft.model.device.type == "cuda" and draft.can_capture
    return GraphLanguageModelSource(draft) if is_captured else LanguageModelSource(draft)
