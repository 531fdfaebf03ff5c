"""A stage's layers with fixed shapes, so that a GPU can replay them as one CUDA graph.

A decoding step of a few rows launches hundreds of small kernels; on a GPU that takes longer than
their work. Here everything that changes from step to step (rows, where they are written, what they
see) is copied into fixed buffers, attention looks at the whole capacity of the cache behind a mask,
and the launches are recorded once for each number of rows. On a CPU the same function runs without
being recorded.
"""

# l rows of a segment, P padded rows, H hidden, C rows of the cache's buffers, S mask columns

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedraft.models.stage_cache import additive_mask

MAX_ROWS = 64
"""Longer segments gain nothing; their kernels are long enough."""
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Whose layers launch the same kernels whatever the rows hold."""


@dataclass
class Inputs:
    """Buffers that a recorded graph reads."""

    hidden_1PH: Tensor
    slots_P: Tensor
    """int64: where in the cache each row is written."""
    cosine_1PD: Tensor
    sine_1PD: Tensor
    masks: dict[str, Tensor]
    """Kind of layer -> [1, 1, P, C], additive."""

    def copy_(self, other: "Inputs") -> None:
        pairs = [(mask, other.masks[kind]) for kind, mask in self.masks.items()]
        pairs += [
            (self.hidden_1PH, other.hidden_1PH),
            (self.slots_P, other.slots_P),
            (self.cosine_1PD, other.cosine_1PD),
            (self.sine_1PD, other.sine_1PD),
        ]
        for mine, new in pairs:
            mine.copy_(new)


@dataclass
class Recorded:
    inputs: Inputs
    replay: Callable[[], None]
    hidden_1PH: Tensor
    taps: dict[int, Tensor]


def padded_rows(num_rows: int) -> int:
    """The next power of two: a graph for each of few sizes."""
    return 1 << (num_rows - 1).bit_length()


class StageGraphs:
    """Runs rows through the layers of one stage and into its cache."""

    def __init__(self, stage: Any) -> None:
        """
        Args:
            stage: ``models.target.Stage``; its cache is made to hold fixed buffers.
        """
        self.stage = stage
        self._recorded: dict[tuple[int, tuple[int, ...]], Recorded] = {}
        self._capacity = -1
        stage.cache.spare_rows = MAX_ROWS

    def run(
        self, hidden_lH: Tensor, positions_l: Tensor, visible_lS: Tensor, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What ``Stage._run`` computes; results are copies that the next step does not change."""
        num_rows = len(positions_l)
        inputs = self._inputs(hidden_lH, positions_l, visible_lS)
        cache = self.stage.cache
        if cache.capacity != self._capacity:  # graphs of smaller buffers read freed memory
            self._recorded.clear()
            self._capacity = cache.capacity
        key = (len(inputs.slots_P), tuple(sorted(taps)))
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs, taps)
        recorded = self._recorded[key]
        recorded.inputs.copy_(inputs)
        recorded.replay()
        collected = {i: rows_1PH[0, :num_rows].clone() for i, rows_1PH in recorded.taps.items()}
        if self.stage.start == 0 and 0 in taps:
            collected[0] = hidden_lH
        return recorded.hidden_1PH[0, :num_rows].clone(), collected

    def _inputs(self, hidden_lH: Tensor, positions_l: Tensor, visible_lS: Tensor) -> Inputs:
        stage = self.stage
        num_rows = len(positions_l)
        num_spare = padded_rows(num_rows) - num_rows
        positions_C = stage.cache.begin(positions_l)
        end, capacity = len(positions_C), stage.cache.capacity
        positions_P = torch.cat([positions_l, positions_l[-1:].expand(num_spare)])
        device = positions_l.device
        slots_P = torch.cat(
            [
                torch.arange(end - num_rows, end, device=device),
                torch.arange(capacity, capacity + num_spare, device=device),
            ]
        )
        hidden_PH = torch.cat([hidden_lH, hidden_lH.new_zeros(num_spare, hidden_lH.shape[1])])
        cosine_1PD, sine_1PD = stage.rotary(hidden_PH[None], positions_P[None])
        masks = {}
        for kind in set(stage.kinds):
            window = stage.window if kind == "sliding_attention" else None
            used_11lC = additive_mask(visible_lS, positions_C, window, hidden_lH.dtype)
            lowest = torch.finfo(hidden_lH.dtype).min
            mask_11PC = used_11lC.new_full((1, 1, len(slots_P), capacity + MAX_ROWS), lowest)
            mask_11PC[:, :, :num_rows, :end] = used_11lC
            mask_11PC[:, :, num_rows:, :1] = 0  # a spare row has to see something
            masks[kind] = mask_11PC
        return Inputs(hidden_PH[None], slots_P, cosine_1PD, sine_1PD, masks)

    def _record(self, example: Inputs, taps: Collection[int]) -> Recorded:
        inputs = Inputs(
            example.hidden_1PH.clone(),
            example.slots_P.clone(),
            example.cosine_1PD.clone(),
            example.sine_1PD.clone(),
            {kind: mask.clone() for kind, mask in example.masks.items()},
        )
        hidden_1PH, collected = self._layers(inputs, taps)  # makes the cache's buffers
        recorded = Recorded(inputs, lambda: None, hidden_1PH, collected)

        def compute() -> None:
            recorded.hidden_1PH, recorded.taps = self._layers(inputs, taps)

        recorded.replay = compute
        if hidden_1PH.is_cuda:
            recorded.replay = _capture(compute, hidden_1PH.device)
        return recorded

    def _layers(self, inputs: Inputs, taps: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        stage = self.stage
        hidden_1PH = inputs.hidden_1PH
        collected = {}
        with stage.cache.writing_to(inputs.slots_P):
            layers = zip(stage.layers, stage.kinds, strict=True)
            for index, (layer, kind) in enumerate(layers, start=stage.start + 1):
                hidden_1PH = layer(
                    hidden_1PH,
                    attention_mask=inputs.masks[kind],
                    position_embeddings=(inputs.cosine_1PD, inputs.sine_1PD),
                    past_key_values=stage.cache,
                )
                if index in taps:
                    collected[index] = hidden_1PH
        return hidden_1PH, collected


def _capture(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record what ``compute`` launches; libraries choose their kernels in runs before."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may look after a link's transfers meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            compute()
    return graph.replay
