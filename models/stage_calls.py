"""Two faster calls of a stage's layers: recorded as a CUDA graph, and several sequences at once.

Graphs: a decoding step of a few rows launches hundreds of small kernels; on a GPU that takes longer
than their work. Everything that changes from step to step (rows, where they are written, what they
see) is copied into fixed buffers, attention looks at the whole capacity of the cache behind a mask,
and the launches are recorded once for each number of rows. On a CPU the same function runs without
being recorded.

Together: rows of several sequences, each with its own cache, are put one after the other without
padding: projections and MLPs see one matrix, so weights are read once for all sequences, and
attention runs sequence by sequence over its own keys.
"""

# l rows of a segment, P padded rows, R rows of all segments, H hidden, C rows of a cache
# S mask columns, N query heads, J key heads, D head size

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipedraft.models.stage_cache import Segment, StageCache, additive_mask

if TYPE_CHECKING:
    from pipedraft.models.target import Stage

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

    @property
    def tensors(self) -> list[Tensor]:
        rows = [self.hidden_1PH, self.slots_P, self.cosine_1PD, self.sine_1PD]
        return rows + [self.masks[kind] for kind in sorted(self.masks)]


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

    def __init__(self, stage: "Stage") -> None:
        """The stage's cache is made to hold fixed buffers."""
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
        for buffer, new in zip(recorded.inputs.tensors, inputs.tensors, strict=True):
            buffer.copy_(new)
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
        inputs = deepcopy(example)
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


# -- several sequences -------------------------------------------------------------------------


def can_run_together(stage: "Stage") -> bool:
    """Attention must be torch's, on a CPU or without recorded graphs, and nothing recurrent."""
    attention = stage.layers[0].self_attn.config._attn_implementation
    return not stage.is_chain_only and stage.graphs is None and attention == "sdpa"


@torch.inference_mode()
def forward_together(stages: Sequence["Stage"], segments: Sequence[Segment]) -> list[Tensor]:
    """What ``Stage.forward`` computes for each, to rounding; rows are appended as speculative.

    Args:
        stages: of the same layers of the same model, with caches of their own.

    Returns:
        Hidden states [l, H] of each segment after the last layer.
    """
    first = stages[0]
    assert all(stage.layers[0] is first.layers[0] for stage in stages), "one model's stages"
    caches = [stage.cache for stage in stages]
    sizes = [segment.num_rows for segment in segments]
    own_positions = [segment.positions.to(first.device) for segment in segments]
    known = [cache.begin(p) for cache, p in zip(caches, own_positions, strict=True)]
    parts = [
        stage._enter(segment.ids if stage.embedding is not None else segment.hidden)
        for stage, segment in zip(stages, segments, strict=True)
    ]
    hidden_1RH = torch.cat(parts)[None]
    masks = {}
    for kind in set(first.kinds):
        window = first.window if kind == "sliding_attention" else None
        masks[kind] = [
            additive_mask(segment.visible.to(first.device), positions_C, window, hidden_1RH.dtype)
            for segment, positions_C in zip(segments, known, strict=True)
        ]
    rotary = first.rotary(hidden_1RH, torch.cat(own_positions)[None])
    apart = _Apart(caches, sizes)
    # Never read; without a mask transformers would ask for a causal one.
    unused_mask = hidden_1RH.new_zeros(1, 1, 1, hidden_1RH.shape[1])
    with apart:
        for layer, kind in zip(first.layers, first.kinds, strict=True):
            apart.masks = masks[kind]
            hidden_1RH = layer(
                hidden_1RH,
                attention_mask=unused_mask,
                position_embeddings=rotary,
                past_key_values=apart,
            )
    for cache in caches:
        cache.advance(committed=False)
    return list(hidden_1RH[0].split(sizes))


class _Apart(TorchFunctionMode):
    """Stands where a cache stands, and lets each sequence attend to its own rows."""

    def __init__(self, caches: Sequence[StageCache], sizes: Sequence[int]) -> None:
        super().__init__()
        self.caches, self.sizes = caches, list(sizes)
        self.masks: list[Tensor] = []
        self._known: list[tuple[Tensor, Tensor]] = []

    def update(
        self, keys_1JRD: Tensor, values_1JRD: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Called by the attention modules; what they get back has the right shape, no more."""
        pairs = zip(keys_1JRD.split(self.sizes, 2), values_1JRD.split(self.sizes, 2), strict=True)
        self._known = [
            cache.update(keys, values, layer_idx)
            for cache, (keys, values) in zip(self.caches, pairs, strict=True)
        ]
        return keys_1JRD, values_1JRD

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        outs = []
        for query_1NlD, (keys_1JCD, values_1JCD), mask in zip(
            args[0].split(self.sizes, 2), self._known, self.masks, strict=True
        ):
            outs.append(
                func(
                    query_1NlD,
                    keys_1JCD,
                    values_1JCD,
                    attn_mask=mask,
                    scale=kwargs.get("scale"),
                    enable_gqa=query_1NlD.shape[1] != keys_1JCD.shape[1],
                )
            )
        return torch.cat(outs, 2)
