"""Two faster calls of a stage's layers: captured as a CUDA graph, and several sequences at once.

Graphs: embedding, masks and rotary tables are made of what is packed on the host, inside the graph.
Attention looks at the whole capacity of the cache behind a mask.

Together: rows of several sequences, each with its own cache, are put one after the other without
padding: projections and MLPs see one matrix, so weights are read once for all sequences, and
attention runs sequence by sequence over its own keys.
"""

# l rows of a segment, P padded rows, R rows of all segments, H hidden, C rows of a cache
# S mask columns, N query heads, J key heads, D head size

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipedraft.models.cuda_graphs import Graphs, Packing, borrow_for, hidden_columns, padded_rows
from pipedraft.models.families import has_latents
from pipedraft.models.layers import grouped_attention
from pipedraft.models.stage_cache import Segment, StageCache, additive_mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipedraft.models.target import Stage

MAX_ROWS = 64
"""Longer segments gain nothing; their kernels are long enough."""
MIN_COLUMNS = 32
"""So many speculative rows share a graph."""
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Whose layers launch the same kernels whatever the rows hold."""
READ_BY_HOST = ("dynamic", "longrope")
"""Rotary tables that depend on the longest position."""


def can_capture(config: "PreTrainedConfig") -> bool:
    if config.model_type not in FAMILIES or config._attn_implementation != "sdpa":
        return False
    return config.rope_parameters.get("rope_type", "default") not in READ_BY_HOST


class StageGraphs(Graphs):
    """Runs rows through the layers of one stage and into its cache.

    A step is one copy to the device, the hidden states of the stage before, one graph, and a copy
    of what it leaves: five launches at most, whatever the model.
    """

    def __init__(self, stage: "Stage") -> None:
        """The stage's cache is made to hold fixed buffers."""
        super().__init__(stage.device)
        self.stage = stage
        self._capacity = -1
        stage.cache.spare_rows = MAX_ROWS

    def forward(
        self, hidden_or_ids: Tensor, positions_l: Tensor, visible_lS: Tensor, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Forward by a graph, as ``Stage._run``; results are copies that no later step changes.

        Args:
            hidden_or_ids: ids for a first stage.
            positions_l: as the mask and the ids best in the host's memory.
        """
        cache, num_rows = self.stage.cache, len(positions_l)
        P, S = padded_rows(num_rows), padded_rows(max(visible_lS.shape[1], MIN_COLUMNS))
        packing = Packing(num_committed=1, slots_P=P, positions_P=P, ids_P=P, visible_PS=P * S)
        cache.reserve(num_rows, self.stage.device)
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
        out_KlH = out_KPH[:, :num_rows].clone()
        return out_KlH[0], dict(zip(own, out_KlH[1:], strict=True))

    def move(self, rows: list[int], first: int) -> None:
        """``StageCache.move`` of all layers in one graph; spare rows stay where they are."""
        cache, num_spare = self.stage.cache, padded_rows(len(rows)) - len(rows)
        if num_spare > MAX_ROWS:
            cache.move(rows, first)
            return
        self._forget_smaller()
        spare = range(cache.capacity, cache.capacity + num_spare)
        packed = torch.tensor([*rows, *spare, *range(first, first + len(rows)), *spare])

        def compute(packed: Tensor, _: Tensor | None) -> Tensor:
            cache.copy_rows(*packed.chunk(2))
            return packed

        key = ("move",)
        if (key, len(packed), 0) not in self._graphs:  # capturing runs it, and more than once
            itself = torch.arange(len(packed) // 2).repeat(2)
            self.run(key, itself, [], compute)
        self.run(key, packed, [], compute)

    def _forget_smaller(self) -> None:
        """Graphs of smaller buffers read freed memory."""
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
        """One tensor on the host; spare rows are written behind the cache."""
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
        """All of the stage, from fixed buffers to a new one."""
        stage, cache = self.stage, self.stage.cache
        # A replay reads all that differs from call to call from `packed`.
        given = packing.unpack(packed)
        if rows_PH is None:
            assert stage.embedding is not None
            rows_PH = stage.embedding(given["ids_P"])
        hidden_1PH = rows_PH[None]
        masks = self._masks(given, hidden_1PH.dtype)
        places = stage.places(hidden_1PH, given["positions_P"], stage.kinds)
        collected = {0: hidden_1PH} if 0 in taps else {}
        # Spare rows are written behind the cache, where no mask shows them.
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
        """Kind of layer -> [1, 1, g, C], additive, over the whole buffers of the cache; see
        ``grouped_attention``."""
        stage, positions_P = self.stage, given["positions_P"]
        positions_C = stage.cache.write_positions(given["slots_P"], positions_P)
        visible_PS = given["visible_PS"].view(len(positions_P), -1)
        # Committed rows are visible, speculative ones as their column says, nothing behind them.
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


def lend_graphs(stage: "Stage") -> StageGraphs:
    """Graphs, and the cache that they write to, for as long as the stage lives."""

    def make() -> StageGraphs:
        return StageGraphs(copy(stage))  # a twin, which may outlive it

    graphs = borrow_for(stage.layers[0], stage, (stage.start, stage.end), make)
    graphs.stage.cache.reset()
    return graphs


# -- several sequences -------------------------------------------------------------------------


def can_run_together(stage: "Stage") -> bool:
    """Attention must be torch's and read what is cached, and nothing recurrent or of one shape."""
    config = stage.layers[0].self_attn.config
    if stage.cache.recurrent_layers or stage.is_bitwise or has_latents(config):
        return False
    return config._attn_implementation == "sdpa"


@torch.inference_mode()
def forward_together(
    stages: Sequence["Stage"], segments: Sequence[Segment], taps: Collection[int] = ()
) -> list[Segment]:
    """Forward of several sequences' stages at once, to rounding; rows are appended as speculative.

    Args:
        stages: of the same layers of the same model, with caches of their own.
        taps: of all segments.
    """
    first = stages[0]
    assert all(stage.layers[0] is first.layers[0] for stage in stages), "one model's stages"
    caches = [stage.cache for stage in stages]
    sizes = [segment.num_rows for segment in segments]
    own_positions = [segment.positions.to(first.device) for segment in segments]
    # Every sequence has a cache of its own; the rows go through the layers side by side.
    known = [cache.begin(p) for cache, p in zip(caches, own_positions, strict=True)]
    parts = [
        stage._enter(segment.ids if stage.embedding is not None else segment.hidden)
        for stage, segment in zip(stages, segments, strict=True)
    ]
    hidden_1RH = torch.cat(parts)[None]
    # A mask for each kind of layer and sequence: rows see the cache of their own sequence alone.
    masks = {}
    for kind in set(first.kinds):
        window = first.window if kind == "sliding_attention" else None
        masks[kind] = [
            additive_mask(
                segment.visible.to(first.device),
                positions_C,
                window,
                hidden_1RH.dtype,
                groups=first.groups,
            )
            for segment, positions_C in zip(segments, known, strict=True)
        ]
    places = first.places(hidden_1RH, torch.cat(own_positions), first.kinds)
    apart = _Apart(caches, sizes, is_folded=first.groups > 1)
    # Never read; without a mask transformers would ask for a causal one.
    unused_mask = hidden_1RH.new_zeros(1, 1, 1, hidden_1RH.shape[1])
    collected = {0: hidden_1RH[0].split(sizes)} if first.start == 0 and 0 in taps else {}
    # The weights are read once for all rows; `apart` has each sequence attend by itself.
    with attending_by(apart.attend):
        for index, (layer, kind) in enumerate(
            zip(first.layers, first.kinds, strict=True), start=first.start + 1
        ):
            apart.masks = masks[kind]
            hidden_1RH = layer(
                hidden_1RH,
                attention_mask=unused_mask,
                past_key_values=apart,
                **places[kind],
            )
            if index in taps:
                collected[index] = hidden_1RH[0].split(sizes)
    for cache in caches:
        cache.advance(committed=False)
    return [
        segment.after(hidden_lH, {layer: parts[place] for layer, parts in collected.items()})
        for place, (segment, hidden_lH) in enumerate(
            zip(segments, hidden_1RH[0].split(sizes), strict=True)
        )
    ]


class _Apart:
    """Stands where a cache stands, and lets each sequence attend to its own rows."""

    def __init__(
        self, caches: Sequence[StageCache], sizes: Sequence[int], *, is_folded: bool
    ) -> None:
        """``is_folded``: masks are of query heads as rows of their key head."""
        self.caches, self.sizes, self.is_folded = caches, list(sizes), is_folded
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

    def attend(self, query_1NRD: Tensor, *_: Tensor, scale: float | None) -> Tensor:
        """Rows in the order of the sequences: [1, N, R, D]."""
        attend = grouped_attention if self.is_folded else _masked
        outs = [
            attend(query_1NlD, *known, mask, scale)
            for query_1NlD, known, mask in zip(
                query_1NRD.split(self.sizes, 2), self._known, self.masks, strict=True
            )
        ]
        return torch.cat(outs, 2)


def _masked(
    query_1NlD: Tensor, keys_1JCD: Tensor, values_1JCD: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    is_shared = query_1NlD.shape[1] != keys_1JCD.shape[1]
    inputs = (query_1NlD, keys_1JCD, values_1JCD, mask)
    return F.scaled_dot_product_attention(*inputs, scale=scale, enable_gqa=is_shared)


# -- attention in transformers' layers ---------------------------------------------------------

Attend = Callable[..., Tensor]
"""(query [1, N, R, D], keys, values, mask, scale=) -> [1, N, R, D]."""
_passing = threading.local()
"""``attend``: what this thread's pass attends by, if not by transformers' own way."""


@contextmanager
def attending_by(attend: Attend) -> Iterator[None]:
    # A TorchFunctionMode would do, but is asked at every call: a fourth of a small pass.
    AttentionInterface.register("sdpa", _attend)
    _passing.attend = attend
    try:
        yield
    finally:
        _passing.attend = None


def shared_heads(config: "PreTrainedConfig", device: torch.device) -> int:
    """Query heads of a key head which attention takes as rows of it, else 1."""
    is_folded = device.type == "cuda" and config._attn_implementation == "sdpa"
    return config.num_attention_heads // config.num_key_value_heads if is_folded else 1


def folding_heads(groups: int) -> AbstractContextManager[None]:
    """Masks inside are of ``groups`` times the rows; see ``grouped_attention``."""
    return attending_by(grouped_attention) if groups > 1 else nullcontext()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' "sdpa", unless inside ``attending_by``."""
    attend = getattr(_passing, "attend", None)
    if attend is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    out_1NRD = attend(query, key, value, attention_mask, scale=options.get("scaling"))
    return out_1NRD.transpose(1, 2).contiguous(), None
