"""Text rows (committed tokens) and tree rows, in the order of a draft's keys and values."""

# A text rows, R tree rows, C cached rows, H hidden

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.speed.cuda_graphs import Graphs, padded_rows
from ...models.transformer.layers import FixedKeyValues, KeyValues
from ..tree import TokenTree

TEXT = sys.maxsize
"""Name for every committed text row; no tree has as many rows."""
NOBODY = -sys.maxsize
"""Name for rows outside every tree, until the next renaming."""
MIN_PLACES = 256


@dataclass
class NewText:
    tokens: list[int]
    features: list[Mapping[int, Tensor]]
    """Target hidden states by layer, in parts; empty for a draft that reads only tokens."""

    def gathered(self, layers: Sequence[int]) -> tuple[dict[int, list[int]], list[Tensor]]:
        """Return each row's index into the hidden states for each layer, and these states."""
        found: dict[int, list[int]] = {layer: [] for layer in layers}
        sources, first = [], 0
        for part in self.features:
            for layer in layers:
                sources.append(part[layer])
                found[layer] += range(first, first + len(part[layer]))
                first += len(part[layer])
        return found, sources

    def split(self, count: int) -> NewText:
        """Split off the first tokens."""
        parts = self.features
        layers = parts[0] if parts else {}
        whole = {layer: torch.cat([part[layer] for part in parts]) for layer in layers}
        head = NewText(self.tokens[:count], [{x: y[:count] for x, y in whole.items()}])
        self.tokens = self.tokens[count:]
        self.features = [{x: y[count:] for x, y in whole.items()}] if self.tokens else []
        return head


class GraphText:
    """Keys and values for text rows in fixed-size buffers, read and written by CUDA graphs.

    Buffers and graphs outlive the sequence. Padding rows are written after all places.
    """

    def __init__(self, num_layers: int, draft_ids: Tensor) -> None:
        """``draft_ids`` are on the draft's device."""
        self.graphs, self.ids_U = Graphs(draft_ids.device), draft_ids.cpu()
        self._caches = [FixedKeyValues(0) for _ in range(num_layers)]
        self._num_places = self._num_spare = 0
        self.restart()

    def restart(self) -> None:
        """Start a new sequence."""
        self._num_text = 0

    def _reserve(self, num_places: int, num_spare: int) -> None:
        if num_places <= self._num_places and num_spare <= self._num_spare:
            return
        self._num_places = padded_rows(max(num_places, self._num_places, MIN_PLACES))
        self._num_spare = padded_rows(max(num_spare, self._num_spare, 1))
        for cache in self._caches:
            cache.grow(self._num_places + self._num_spare)
        self.graphs.clear()


class RowCache:
    """Cache of rows, with keys and values for every draft layer, and the outputs.

    Each row is computed once. A tree row is named by its row number, and stays until it leaves the
    tree or becomes text. A row sees the text, its cached ancestors and itself.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.restart()

    def restart(self) -> None:
        """Start a new sequence."""
        self._num_leading = 0
        """Number of text rows before all other rows; most rows are among them, and need no name."""
        self._names: list[int] = []
        """Name of each cached row after the leading text rows, in key-value order."""
        self.layers = [KeyValues() for _ in range(self._num_layers)]
        self.outputs: dict[int, Tensor] = {}
        """Name -> output [H], for tree rows."""

    @property
    def names(self) -> list[int]:
        """Name of each cached row, in key-value order."""
        return [TEXT] * self._num_leading + self._names

    @property
    def known(self) -> Collection[int]:
        """Names of tree rows with cached outputs."""
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
        """Add A text rows, then tree rows. Return the text rows' outputs [A, H].

        Args:
            rows: not cached yet. Each row's ancestors are text, cached, or earlier in the list.
            forward: appends A + R rows to all layers' caches with visibility bool [A + R, C], and
                returns their outputs [A + R, H].
            name: maps this tree's rows to names and back, and keeps two trees' rows apart.
        """
        first, new = len(self._names), [name(row) for row in rows]
        self._names += [TEXT] * num_text + new
        text_O = torch.tensor([cached == TEXT for cached in self._names], dtype=torch.bool)
        # tril: text row a sees cached text and the a text rows before it in this call.
        earlier_AO = text_O.expand(num_text, -1).tril(first)
        ancestors_RO = tree.ancestors(rows, [name(cached) for cached in self._names])
        others = torch.cat([earlier_AO, text_O | ancestors_RO])
        visible_RC = torch.nn.functional.pad(others, (self._num_leading, 0), value=True)
        self._count_leading()
        outputs_RH = forward(self.layers, visible_RC)
        self.outputs.update(zip(new, outputs_RH[num_text:], strict=True))
        return outputs_RH[:num_text]

    def rename(self, names: Mapping[int, int]) -> None:
        """Rename tree rows that moved or became ``TEXT``, and drop rows without a new name."""
        names = {**names, TEXT: TEXT}
        places = [place for place, name in enumerate(self._names) if name in names]
        for layer in self.layers:
            # Leading text never moves, so its keys and values need no copy.
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
