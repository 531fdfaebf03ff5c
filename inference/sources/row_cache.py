"""Rows of a text and of a tree, in the order of a draft's keys and values."""

# A rows of the text, R rows of a tree, C cached rows, H hidden

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedraft.inference.tree import TokenTree
from pipedraft.models.cuda_graphs import Recordings, padded_rows
from pipedraft.models.layers import FixedKeyValues, KeyValues

TEXT = sys.maxsize
"""Name of every row of the committed text; no tree has as many rows."""
NOBODY = -sys.maxsize
"""Of rows that no tree has got, until the next renaming."""
MIN_PLACES = 256


@dataclass
class NewText:
    tokens: list[int]
    features: list[Mapping[int, Tensor]]
    """Hidden states of the target by layer, in parts; none for a draft that reads tokens alone."""

    def gathered(self, layers: Sequence[int]) -> tuple[dict[int, list[int]], list[Tensor]]:
        """Where each row finds its hidden states of each layer among some, and these."""
        found: dict[int, list[int]] = {layer: [] for layer in layers}
        sources, first = [], 0
        for part in self.features:
            for layer in layers:
                sources.append(part[layer])
                found[layer] += range(first, first + len(part[layer]))
                first += len(part[layer])
        return found, sources

    def split(self, count: int) -> NewText:
        """Take the first tokens away."""
        parts = self.features
        whole = (
            {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
            if parts
            else {}
        )
        head = NewText(self.tokens[:count], [{x: y[:count] for x, y in whole.items()}])
        self.tokens = self.tokens[count:]
        self.features = [{x: y[count:] for x, y in whole.items()}] if self.tokens else []
        return head


class RecordedText:
    """Keys and values of a text in buffers of one size, which recorded graphs read and fill.

    Buffers and graphs outlive the text. Spare rows go behind its places.
    """

    def __init__(self, num_layers: int, draft_ids: Tensor) -> None:
        """``draft_ids`` are on the draft's device."""
        self.recordings, self.ids_U = Recordings(draft_ids.device), draft_ids.cpu()
        self._caches = [FixedKeyValues(0) for _ in range(num_layers)]
        self._num_places = self._num_spare = 0
        self.restart()

    def restart(self) -> None:
        """A new text."""
        self._num_text = 0

    def _reserve(self, num_places: int, num_spare: int) -> None:
        if num_places <= self._num_places and num_spare <= self._num_spare:
            return
        self._num_places = padded_rows(max(num_places, self._num_places, MIN_PLACES))
        self._num_spare = padded_rows(max(num_spare, self._num_spare, 1))
        for cache in self._caches:
            cache.grow(self._num_places + self._num_spare)
        self.recordings.clear()


class RowCache:
    """Keys and values of every draft layer, and the output, of rows.

    A row is computed once. One of the tree has the name of its row there, and stays until it leaves
    the tree or becomes text. It sees the text, and its ancestors-or-self among the cached rows.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.restart()

    def restart(self) -> None:
        """A new text."""
        self._num_leading = 0
        """Rows of the text before all others: the most, and nothing has to be known of each."""
        self._names: list[int] = []
        """Of each cached row behind them, in the order of the keys and values."""
        self.layers = [KeyValues() for _ in range(self._num_layers)]
        self.outputs: dict[int, Tensor] = {}
        """Name -> output [H], of the rows of the tree."""

    @property
    def names(self) -> list[int]:
        """Name of each cached row, in the order of the keys and values."""
        return [TEXT] * self._num_leading + self._names

    @property
    def known(self) -> Collection[int]:
        """Names of the tree's rows whose outputs are cached."""
        return self.outputs.keys()

    @property
    def num_text(self) -> int:
        return self._num_leading + self._names.count(TEXT)

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
        first, new = len(self._names), [name(row) for row in rows]
        self._names += [TEXT] * num_text + new
        text_O = torch.tensor([cached == TEXT for cached in self._names], dtype=torch.bool)
        earlier_AO = text_O.expand(num_text, -1).tril(first)
        ancestors_RO = tree.ancestors(rows, [name(cached) for cached in self._names])
        others = torch.cat([earlier_AO, text_O | ancestors_RO])
        visible_RC = torch.nn.functional.pad(others, (self._num_leading, 0), value=True)
        self._count_leading()
        outputs_RH = forward(self.layers, visible_RC)
        self.outputs.update(zip(new, outputs_RH[num_text:], strict=True))
        return outputs_RH[:num_text]

    def rename(self, names: Mapping[int, int]) -> None:
        """Rows of the tree have moved or became ``TEXT``; those without a new name are dropped."""
        names = {**names, TEXT: TEXT}
        places = [place for place, name in enumerate(self._names) if name in names]
        for layer in self.layers:
            layer.keep(self._num_leading, places)
        self._names = [names[self._names[place]] for place in places]
        self._count_leading()
        outputs = {names.get(name, TEXT): output for name, output in self.outputs.items()}
        outputs.pop(TEXT, None)
        self.outputs = outputs

    def _count_leading(self) -> None:
        others = (place for place, name in enumerate(self._names) if name != TEXT)
        count = next(others, len(self._names))
        self._num_leading += count
        self._names = self._names[count:]
