"""The layers of one pipeline stage, with their cache for one sequence."""

# l rows of a segment, C rows in use (new ones included), S speculative rows up to and including the
# segment, H hidden

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..speed import rounded
from ..speed.attending import shared_heads
from ..speed.plain_layers import PlainLayers
from ..transformer.decoder import LayerPositions, embed, layer_kinds
from ..transformer.stage_cache import StageCache, additive_mask

NO_INPUT = "stage 0 needs token ids, later stages hidden states"


class StageLayers:
    """Layers [start, end) of a target, with their cache for one sequence.

    A stage references its own layers, the rotary tables and, if first, the embedding. A process
    with one stage can drop the rest of the model. ``stage.py`` runs segments through the layers,
    ``stage_graphs.py`` in CUDA graphs, ``together.py`` for several sequences.
    """

    def __init__(self, model: PreTrainedModel, start: int, end: int):
        decoder = model.get_decoder()
        self.config: PreTrainedConfig = decoder.config
        self.start = start
        self.end = end
        self.layers = list(decoder.layers[start:end])
        self.places = LayerPositions(decoder)
        self.embedding: Callable[[Tensor], Tensor] | None = None
        if start == 0:
            self.embedding = partial(embed, decoder.embed_tokens, decoder.config)
        kinds = layer_kinds(decoder.config)
        self.kinds = kinds[start:end]
        self.plain = PlainLayers(self.layers, self.kinds)
        recurrent = [start + i for i, kind in enumerate(self.kinds) if kind == "linear_attention"]
        self.window = decoder.config.sliding_window if "sliding_attention" in self.kinds else None
        self.device = next(self.layers[0].parameters()).device
        self.cache = StageCache(recurrent)
        self.is_rounded = rounded.rounded_dtype(self.layers[0]) is not None
        self.is_bitwise = False
        self.groups = shared_heads(decoder.config, self.device)

    def enter(self, hidden_or_ids: Tensor | None) -> Tensor:
        """Return the rows that the first layer reads, of token ids or hidden states."""
        assert hidden_or_ids is not None, NO_INPUT
        rows = hidden_or_ids.to(self.device)
        return rows if self.embedding is None else self.embedding(rows)

    def masks(
        self, visible_lS: Tensor, positions_C: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor | None]:
        """Return attention masks, as ``additive_mask`` makes them, by layer kind."""
        build = partial(additive_mask, visible_lS, positions_C, dtype=dtype, groups=self.groups)
        windows = {"full_attention": None, "sliding_attention": self.window}
        masks = {kind: build(window=windows[kind]) for kind in windows.keys() & {*self.kinds}}
        return {"linear_attention": None} | masks
