"""One pipeline stage of a target: some of its layers, with their cache for one sequence."""

# l rows of a segment, P prompt rows, C rows in use (new ones included), S speculative rows up to
# and including the segment, H hidden

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..speed.attending import folding_heads, masked
from ..transformer.stage_cache import (
    Abandoned,
    KeepRows,
    Segment,
)
from . import stage_graphs
from .stage_graphs import StageGraphs
from .stage_layers import NO_INPUT, StageLayers
from .together import forward_bitwise, forward_together


class Stage(StageLayers):
    """A stage that runs segments: layer by layer, in CUDA graphs, or row by row."""

    def __init__(self, model: PreTrainedModel, start: int, end: int):
        super().__init__(model, start, end)
        self.graphs: StageGraphs | None = None
        """Graphs that run speculative rows; None: rows run layer by layer."""
        if self.device.type == "cuda" and stage_graphs.can_capture(self.config):
            self.graphs = stage_graphs.lend_graphs(self)
            self.cache = self.graphs.stage.cache  # graphs write to this cache

    @property
    def num_committed(self) -> int:
        return self.cache.num_committed

    @property
    def num_speculative(self) -> int:
        return self.cache.num_speculative

    def reset(self) -> None:
        self.cache.reset()
        self.plain.reset()

    @torch.inference_mode()
    def keep(self, keep: KeepRows) -> None:
        """Apply a KeepRows to the cached rows. For waiting rows, use ``prune_segment``."""
        self.cache.keep(keep, None if self.graphs is None else self.graphs.move)

    @torch.inference_mode()
    def skip(self, segment: Segment) -> None:
        """Count a segment's rows without computing them. A later KeepRows drops them all."""
        self.cache.skip(segment.positions.to(self.device))

    @torch.inference_mode()
    def forward(
        self,
        segment: Segment,
        taps: Collection[int] = (),
        is_wanted: Callable[[], bool] | None = None,
    ) -> Segment:
        """Run a segment and append its rows as speculative.

        Args:
            is_wanted: called before every layer, except in graphs and with ``bitwise``.

        Returns:
            The segment with ``hidden`` after layer ``end``, and taps for indices in (start, end]
            (also 0 from the first stage).

        Raises:
            Abandoned: ``is_wanted`` returned False. The segment counts as not run.
        """
        assert segment.lo == self.num_speculative, (
            f"stage [{self.start}, {self.end}) holds {self.num_speculative} speculative rows, "
            f"the segment starts at row {segment.lo}"
        )
        if self.is_rounded:
            return forward_together([self], [segment], taps, is_wanted)[0]
        if self.is_bitwise:
            return forward_bitwise(self, segment, taps)
        entering = segment.ids if self.embedding is not None else segment.hidden
        if self.graphs is not None and segment.num_rows <= stage_graphs.MAX_ROWS:
            assert entering is not None, NO_INPUT
            call = (entering, segment.positions, segment.visible, taps)
            hidden_lH, collected = self.graphs.forward(*call)
        else:
            visible_lS = segment.visible.to(self.device)
            parents = segment.parents if self.cache.recurrent_layers else None  # attention: masks
            positions_C = self.cache.begin(segment.positions.to(self.device), parents)
            rows_lH = self.enter(entering)
            hidden_lH, collected = self._run(rows_lH, positions_C, visible_lS, taps, is_wanted)
        self.cache.advance(committed=False)
        return segment.after(hidden_lH, collected)

    @torch.inference_mode()
    def prefill(
        self,
        hidden_or_ids: Tensor,
        positions: Tensor,
        taps: Collection[int] = (),
        *,
        length: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run and commit rows, where each row sees itself and all rows before it.

        Args:
            hidden_or_ids: int64 [P] for the first stage, [P, H] for the others.
            positions: int64 [P], continuing the committed positions.
            length: length of the whole prompt. None: it ends with these rows.

        Returns:
            hidden_PH after layer ``end``, and the tapped states as in ``forward``.
        """
        assert self.num_speculative == 0, "committed rows cannot follow speculative ones"
        num_rows = positions.shape[0]
        positions_C = self.cache.begin(positions.to(self.device))
        causal_PP = torch.ones(num_rows, num_rows, dtype=torch.bool, device=self.device).tril_()
        rows_PH = self.enter(hidden_or_ids)
        length = length or int(positions[-1]) + 1
        hidden_PH, collected = self._run(rows_PH, positions_C, causal_PP, taps, length=length)
        self.cache.advance(committed=True)
        return hidden_PH, collected

    def _run(
        self,
        hidden_lH: Tensor,
        positions_C: Tensor,
        visible_lS: Tensor,
        taps: Collection[int],
        is_wanted: Callable[[], bool] | None = None,
        *,
        length: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        masks = self.masks(visible_lS, positions_C, hidden_lH.dtype)
        hidden_1lH = hidden_lH[None]
        places = self.places(hidden_1lH, positions_C[-len(hidden_lH) :], self.kinds, length)
        collected = {0: hidden_lH} if self.start == 0 and 0 in taps else {}
        attends = {k: partial(masked, mask=mask) for k, mask in masks.items()}
        calls = self.plain.calls(
            len(hidden_lH), places=places, cache=self.cache, attends=attends, masks=masks
        )
        with folding_heads(self.groups):
            for index, call in enumerate(calls, start=self.start + 1):
                if is_wanted is not None and not is_wanted():
                    raise Abandoned
                if self.kinds[index - 1 - self.start] == "linear_attention":
                    hidden_1lH = self._call_recurrent(call, hidden_1lH)
                else:
                    hidden_1lH = call(hidden_1lH)
                if index in taps:
                    collected[index] = hidden_1lH[0]
        return hidden_1lH[0], collected

    def _call_recurrent(self, call: Callable[[Tensor], Tensor], hidden_1lH: Tensor) -> Tensor:
        """Run speculative rows as a batch of one-row sequences, each from its parent's state."""
        parts, order = [], []
        for rows in self.cache.recurrent_calls():
            if rows is None:
                return call(hidden_1lH)
            parts.append(call(hidden_1lH[0, rows, None])[:, 0])
            order += rows
        # Rows were run by tree depth; put them back in segment order.
        in_order = torch.tensor(order, device=hidden_1lH.device).argsort()
        return torch.cat(parts)[in_order][None]
