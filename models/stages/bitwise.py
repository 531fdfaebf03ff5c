"""Run forward passes in which no row's bits depend on the other rows, for ``--bitwise``.

Libraries choose kernels by shape, and each kernel sums in its own order. So in bfloat16 a row's
logits depend on the other rows. Here every matrix product is padded to the same row count, and each
row attends alone to its ancestors in order, exactly as in autoregressive decoding. A product
has 16 rows on a CPU. On a GPU it has one, because outputs differed with 16. Rounded weights
(``rounded.py``) do not need this.
"""

# l rows in a pass, P padded rows, C cache rows, N query heads, J key heads, D head size

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..speed.attending import masked
from ..transformer.decoder import PLAIN
from ..transformer.stage_cache import StageCache
from .stage_layers import StageLayers

ROWS = 16
"""Rows per product on a CPU."""
PROMPT_ROWS = 512
"""Rows per prompt chunk in every pipeline, so full chunks have one shape without padding."""


def check_bitwise(config: PreTrainedConfig) -> None:
    """Raise ValueError if the target's products cannot all have one shape."""
    if config.model_type not in PLAIN or config._attn_implementation != "sdpa":
        raise ValueError(
            f"bitwise: targets of model_type {config.model_type!r} with attention "
            f"{config._attn_implementation!r} have no passes of one shape; leave it out, or take "
            f"one of {', '.join(PLAIN)}"
        )


def rows_of_a_pass(device: torch.device) -> int:
    """Return how many rows each pass has."""
    return ROWS if device.type == "cpu" else 1  # 16 rows were not enough on a GPU


def pad(rows_lH: Tensor) -> Tensor:
    """Pad a pass (rows or their positions) to its fixed row count with copies of the last row."""
    num_copies = rows_of_a_pass(rows_lH.device) - len(rows_lH)
    return torch.cat([rows_lH, rows_lH[-1:].expand(num_copies, *rows_lH.shape[1:])])


def _places(seen_C: Tensor) -> Tensor | slice:
    """Return a slice if the places are adjacent, so reading them copies nothing."""
    first, last = int(seen_C[0]), int(seen_C[-1])
    return slice(first, last + 1) if last - first + 1 == len(seen_C) else seen_C


def row_by_row(stage: StageLayers, visible_lS: Tensor) -> "RowByRow":
    """Return a cache stand-in to let every segment row attend alone."""
    # Every row sees all committed rows; the mask covers only the segment's.
    committed_lC = visible_lS.new_ones(len(visible_lS), stage.cache.num_committed)
    return RowByRow(stage.cache, torch.cat([committed_lC, visible_lS], 1), stage.window)


class RowByRow:
    """Cache stand-in that drops padding rows and lets each row attend alone."""

    def __init__(self, cache: StageCache, visible_lC: Tensor, window: int | None) -> None:
        """
        Args:
            visible_lC: bool, cache rows visible to each segment row, including its own.
            window: number of last positions visible to sliding layers, or None for all.
        """
        self.cache = cache
        seen = [visible_C.nonzero()[:, 0] for visible_C in visible_lC]
        self._seen = [_places(seen_C) for seen_C in seen]
        # The last positions seen, by ancestry, as autoregressive decoding would have them.
        self._near = self._seen if window is None else [_places(x[-window:]) for x in seen]
        self._known: tuple[Tensor, Tensor] | None = None
        self._is_windowed = False

    def enter(self, kind: str) -> None:
        """Begin a layer of this kind."""
        self._is_windowed = kind == "sliding_attention"

    def update(
        self, keys_1JPD: Tensor, values_1JPD: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Cache keys and values. Return the arguments, because modules use only their shape."""
        own = slice(len(self._seen))
        self._known = self.cache.update(keys_1JPD[:, :, own], values_1JPD[:, :, own], layer_idx)
        return keys_1JPD, values_1JPD

    def attend(self, query_1NPD: Tensor, *_: Tensor, scale: float | None) -> Tensor:
        assert self._known is not None, "the layer's keys come first"
        keys_1JCD, values_1JCD = self._known
        # Padding rows attend to nothing; zeros keep them finite.
        out_1NPD = torch.zeros_like(query_1NPD)
        for row, seen_C in enumerate(self._near if self._is_windowed else self._seen):
            one = slice(row, row + 1)
            query_1N1D = query_1NPD[:, :, one].contiguous()
            seen = keys_1JCD[:, :, seen_C], values_1JCD[:, :, seen_C]
            out_1NPD[:, :, one] = masked(query_1N1D, *seen, None, scale)
        return out_1NPD
