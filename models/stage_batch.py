"""Rows of several sequences through one stage in one pass, each with its own cache.

Rows are put one after the other, without padding: projections and MLPs see one matrix, so weights
are read once for all sequences, and attention runs sequence by sequence over its own keys.
"""

# l rows of a segment, R rows of all segments, S mask columns, C cached rows, N query heads
# J key heads, D head size, H hidden

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipedraft.models.stage_cache import Segment, StageCache, additive_mask
from pipedraft.models.target import Stage


def can_run_together(stage: Stage) -> bool:
    """Attention must be torch's, on a CPU or without recorded graphs, and nothing recurrent."""
    attention = stage.layers[0].self_attn.config._attn_implementation
    return not stage.is_chain_only and stage.graphs is None and attention == "sdpa"


@torch.inference_mode()
def forward_together(stages: Sequence[Stage], segments: Sequence[Segment]) -> list[Tensor]:
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
