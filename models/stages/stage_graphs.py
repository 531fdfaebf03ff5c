"""Run a stage's layers as a CUDA graph.

Embedding, masks and rotary tables are computed inside the graph from data packed on the host.
Attention covers the cache's whole capacity behind a mask.
"""

# l rows in a segment, P padded rows, H hidden, C cache rows, S mask columns

from collections.abc import Collection, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..speed.attending import attending_by
from ..speed.cuda_graphs import Graphs, Packing, borrow_for, hidden_columns, padded_rows
from ..transformer.decoder import PLAIN
from ..transformer.layers import grouped_attention
from ..transformer.rotary_lengths import short_lengths
from .stage_layers import StageLayers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_ROWS = 64
"""Maximum rows per graph; longer segments gain nothing, as their kernels run long enough."""
MIN_COLUMNS = 32
"""Minimum mask columns, so smaller speculative sets share a graph."""


def can_capture(config: "PreTrainedConfig") -> bool:
    # Such layers launch the same kernels for any row contents.
    if config.model_type not in PLAIN or config._attn_implementation != "sdpa":
        return False
    return not short_lengths(config)  # the host must read the rows' positions


class StageGraphs(Graphs):
    """CUDA graphs that run rows through one stage's layers and into its cache.

    A step takes five launches at most, for any model. They copy the packed inputs and the previous
    stage's hidden states, run one graph, and copy its output.
    """

    def __init__(self, stage: StageLayers) -> None:
        """Switch the stage's cache to fixed buffers."""
        super().__init__(stage.device)
        self.stage = stage
        self._capacity = -1
        stage.cache.spare_rows = MAX_ROWS  # padding rows are written behind the cache

    def forward(
        self, hidden_or_ids: Tensor, positions_l: Tensor, visible_lS: Tensor, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a forward by CUDA graph, like ``Stage._run``, and return copies of the results.

        Args:
            hidden_or_ids: ids for a first stage.
            positions_l: best in host memory, like the mask and the ids.
        """
        cache, num_rows = self.stage.cache, len(positions_l)
        P, S = padded_rows(num_rows), padded_rows(max(visible_lS.shape[1], MIN_COLUMNS))
        packing = Packing(num_committed=1, slots_P=P, positions_P=P, ids_P=P, visible_PS=P * S)
        cache.reserve(num_rows, self.stage.device)  # before the graphs: growing moves the buffers
        self._forget_smaller()
        own = [i for i in sorted(taps) if self.stage.start < i <= self.stage.end]
        if self.stage.start == 0 and 0 in taps:
            own.insert(0, 0)
        is_first = self.stage.embedding is not None
        visible_lS = F.pad(visible_lS, (0, S - visible_lS.shape[1]))
        packed = self._pack(packing, positions_l, visible_lS, hidden_or_ids if is_first else [])
        compute = partial(self._compute, packing, own)
        key = (P, S, tuple(own))
        out_KPH = self.run(key, packed, [] if is_first else [hidden_or_ids], compute)
        out_KlH = out_KPH[:, :num_rows].clone()  # the next replay overwrites its buffer
        return out_KlH[0], dict(zip(own, out_KlH[1:], strict=True))

    def move(self, rows: list[int], first: int) -> None:
        """Run ``StageCache.move`` for all layers in one graph, leaving spare rows in place."""
        cache, num_spare = self.stage.cache, padded_rows(len(rows)) - len(rows)
        if num_spare > MAX_ROWS:  # more padding than the buffers have room for
            cache.move(rows, first)
            return
        self._forget_smaller()
        spare = range(cache.capacity, cache.capacity + num_spare)
        packed = torch.tensor([*rows, *spare, *range(first, first + len(rows)), *spare])

        def compute(packed: Tensor, _: Tensor | None) -> Tensor:
            cache.copy_rows(*packed.chunk(2))
            return packed

        key = ("move",)
        if (key, len(packed), 0) not in self._graphs:  # capturing runs the graph, more than once
            itself = torch.arange(len(packed) // 2).repeat(2)
            self.run(key, itself, [], compute)
        self.run(key, packed, [], compute)

    def _forget_smaller(self) -> None:
        """Drop graphs for smaller buffers, because they would read freed memory."""
        if self.stage.cache.capacity != self._capacity:
            self.clear()
            self._capacity = self.stage.cache.capacity

    def _pack(
        self,
        packing: Packing,
        positions_l: Tensor,
        visible_lS: Tensor,
        ids_l: Tensor | Sequence[int],
    ) -> Tensor:
        """Pack all inputs into one host tensor, and place padding rows behind the cache's rows."""
        cache, num_rows = self.stage.cache, len(positions_l)
        slots_P = torch.arange(packing.sizes["slots_P"])
        slots_P += torch.where(slots_P < num_rows, cache.num_rows, cache.capacity - num_rows)
        return packing.pack(
            num_committed=[cache.num_committed],
            slots_P=slots_P,
            positions_P=positions_l,
            ids_P=ids_l,
            visible_PS=visible_lS,
        )

    def _compute(
        self, packing: Packing, taps: Sequence[int], packed: Tensor, rows_PH: Tensor | None
    ) -> Tensor:
        """Run the whole stage from fixed input buffers, and return a new output buffer."""
        stage, cache = self.stage, self.stage.cache
        # A replay reads everything that varies between calls from `packed`.
        given = packing.unpack(packed)
        if rows_PH is None:
            assert stage.embedding is not None
            rows_PH = stage.embedding(given["ids_P"])
        hidden_1PH = rows_PH[None]
        masks = self._masks(given, hidden_1PH.dtype)
        places = stage.places(hidden_1PH, given["positions_P"], stage.kinds)
        collected = {0: hidden_1PH} if 0 in taps else {}
        # Spare rows are written behind the cache, hidden by every mask.
        with cache.writing_to(given["slots_P"]), attending_by(grouped_attention):
            layers = zip(stage.layers, stage.kinds, strict=True)
            for index, (layer, kind) in enumerate(layers, start=stage.start + 1):
                hidden_1PH = layer(
                    hidden_1PH,
                    attention_mask=masks[kind],
                    past_key_values=cache,
                    **places[kind],
                )
                if index in taps:
                    collected[index] = hidden_1PH
        return torch.cat([hidden_1PH, *(collected[index] for index in taps)])

    def _masks(self, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return additive masks [1, 1, g, C] over the cache's whole buffers, by layer kind.

        See ``grouped_attention``.
        """
        stage, positions_P = self.stage, given["positions_P"]
        positions_C = stage.cache.write_positions(given["slots_P"], positions_P)
        visible_PS = given["visible_PS"].view(len(positions_P), -1)
        # Committed rows are visible, speculative ones by column, rows behind them never.
        hidden_PC = hidden_columns(given["num_committed"], visible_PS, len(positions_C))
        masks = {}
        for kind in set(stage.kinds):
            unseen_PC = hidden_PC
            if kind == "sliding_attention":
                unseen_PC = hidden_PC | (positions_C <= positions_P[:, None] - stage.window)
            zeros_PC = torch.zeros(unseen_PC.shape, dtype=dtype, device=unseen_PC.device)
            mask_PC = zeros_PC.masked_fill_(unseen_PC, torch.finfo(dtype).min)
            groups = stage.layers[0].self_attn.num_key_value_groups
            masks[kind] = mask_PC.repeat(groups, 1)[None, None]
        return masks


def lend_graphs(stage: StageLayers) -> StageGraphs:
    """Borrow graphs, and the cache they write to, for the stage's lifetime."""

    def make() -> StageGraphs:
        return StageGraphs(copy(stage))  # a twin, since the graphs may outlive the stage

    graphs = borrow_for(stage.layers[0], stage, (stage.start, stage.end), make)
    graphs.stage.cache.reset()
    return graphs
