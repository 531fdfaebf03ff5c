"""Two faster ways to run a stage's layers: as a CUDA graph, and for several sequences at once.

Graphs: embedding, masks and rotary tables are computed inside the graph from data packed on the
host. Attention covers the cache's whole capacity behind a mask.

Several sequences: their rows, each with its own cache, are concatenated without padding.
Projections and MLPs see one matrix, so weights are read once for all sequences. Attention runs per
sequence over its own keys.
"""

# l rows in a segment, P padded rows, R rows of all segments, H hidden, C cache rows
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
from pipedraft.models.families import PLAIN, has_latents
from pipedraft.models.layers import grouped_attention
from pipedraft.models.stage_cache import Segment, StageCache, additive_mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipedraft.models.target import Stage

MAX_ROWS = 64
"""Maximum rows per graph; longer segments gain nothing, as their kernels run long enough."""
MIN_COLUMNS = 32
"""Minimum mask columns, so smaller speculative sets share a graph."""
READ_BY_HOST = ("dynamic", "longrope")
"""Rotary types whose table depends on the longest position, which the host must read."""


def can_capture(config: "PreTrainedConfig") -> bool:
    # Such layers launch the same kernels for any row contents.
    if config.model_type not in PLAIN or config._attn_implementation != "sdpa":
        return False
    return config.rope_parameters.get("rope_type", "default") not in READ_BY_HOST


class StageGraphs(Graphs):
    """Runs rows through one stage's layers and into its cache.

    A step takes five launches at most, for any model: they copy the packed inputs and the previous
    stage's hidden states, run one graph, and copy its output.
    """

    def __init__(self, stage: "Stage") -> None:
        """Switch the stage's cache to fixed buffers."""
        super().__init__(stage.device)
        self.stage = stage
        self._capacity = -1
        stage.cache.spare_rows = MAX_ROWS  # padding rows are written behind the cache

    def forward(
        self, hidden_or_ids: Tensor, positions_l: Tensor, visible_lS: Tensor, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a forward by CUDA graph, like ``Stage._run``; results are copies.

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
        """Run ``StageCache.move`` for all layers in one graph; spare rows stay in place."""
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
        """Drop graphs for smaller buffers: they read freed memory."""
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
        """Pack all inputs into one host tensor; padding rows are written after the cache's rows."""
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
        """Run the whole stage, from fixed buffers to a new one."""
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


def lend_graphs(stage: "Stage") -> StageGraphs:
    """Borrow graphs, and the cache they write to, for the stage's lifetime."""

    def make() -> StageGraphs:
        return StageGraphs(copy(stage))  # a twin, since the graphs may outlive the stage

    graphs = borrow_for(stage.layers[0], stage, (stage.start, stage.end), make)
    graphs.stage.cache.reset()
    return graphs


# -- several sequences -------------------------------------------------------------------------


def can_run_together(stage: "Stage") -> bool:
    """Return True if rows of several sequences can share a pass.

    They cannot with recurrent layers, ``bitwise``, latent caches, or attention other than "sdpa".
    """
    if stage.cache.recurrent_layers or stage.is_bitwise:
        return False
    config = stage.layers[0].self_attn.config
    return config._attn_implementation == "sdpa" and not has_latents(config)


@torch.inference_mode()
def forward_together(
    stages: Sequence["Stage"], segments: Sequence[Segment], taps: Collection[int] = ()
) -> list[Segment]:
    """Run several sequences' stages at once; equal to separate runs up to rounding.

    Rows are appended as speculative.

    Args:
        stages: the same layers in the same model, each with its own cache.
        taps: layer indices, the same for all segments.
    """
    first = stages[0]
    assert all(stage.layers[0] is first.layers[0] for stage in stages), "one model's stages"
    caches = [stage.cache for stage in stages]
    sizes = [segment.num_rows for segment in segments]
    own_positions = [segment.positions.to(first.device) for segment in segments]
    # Every sequence has its own cache; the rows pass the layers side by side.
    known = [cache.begin(p) for cache, p in zip(caches, own_positions, strict=True)]
    parts = [
        stage._enter(segment.ids if stage.embedding is not None else segment.hidden)
        for stage, segment in zip(stages, segments, strict=True)
    ]
    hidden_1RH = torch.cat(parts)[None]
    # One mask per layer kind and sequence: rows see only their own sequence's cache.
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
    # Never read; without a mask transformers would create a causal one.
    unused_mask = hidden_1RH.new_zeros(1, 1, 1, hidden_1RH.shape[1])
    collected = {0: hidden_1RH[0].split(sizes)} if first.start == 0 and 0 in taps else {}
    # Weights are read once for all rows; `apart` runs attention per sequence.
    attends = dict.fromkeys(first.kinds, apart.attend)
    calls = first.plain.calls(sum(sizes), places=places, cache=apart, attends=attends) or [
        partial(layer, attention_mask=unused_mask, past_key_values=apart, **places[kind])
        for layer, kind in zip(first.layers, first.kinds, strict=True)
    ]
    with attending_by(apart.attend):
        for index, (call, kind) in enumerate(
            zip(calls, first.kinds, strict=True), start=first.start + 1
        ):
            apart.masks = masks[kind]
            hidden_1RH = call(hidden_1RH)
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
    """Cache stand-in for several sequences: splits the rows, so each attends to its own cache."""

    def __init__(
        self, caches: Sequence[StageCache], sizes: Sequence[int], *, is_folded: bool
    ) -> None:
        """``is_folded``: masks treat query heads as rows of their key head."""
        self.caches, self.sizes, self.is_folded = caches, list(sizes), is_folded
        self.masks: list[Tensor] = []
        self._known: list[tuple[Tensor, Tensor]] = []

    def update(
        self, keys_1JRD: Tensor, values_1JRD: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Cache the keys and values; attention modules need only the shape of the returned ones."""
        pairs = zip(keys_1JRD.split(self.sizes, 2), values_1JRD.split(self.sizes, 2), strict=True)
        self._known = [
            cache.update(keys, values, layer_idx)
            for cache, (keys, values) in zip(self.caches, pairs, strict=True)
        ]
        return keys_1JRD, values_1JRD

    def attend(self, query_1NRD: Tensor, *_: Tensor, scale: float | None) -> Tensor:
        """Return rows in sequence order: [1, N, R, D]."""
        attend = grouped_attention if self.is_folded else masked
        outs = [
            attend(query_1NlD, *known, mask, scale)
            for query_1NlD, known, mask in zip(
                query_1NRD.split(self.sizes, 2), self._known, self.masks, strict=True
            )
        ]
        return torch.cat(outs, 2)


def masked(
    query_1NlD: Tensor,
    keys_1JCD: Tensor,
    values_1JCD: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Run attention [1, N, l, D] by torch's kernel, query heads sharing key heads."""
    is_shared = query_1NlD.shape[1] != keys_1JCD.shape[1]
    inputs = (query_1NlD, keys_1JCD, values_1JCD, mask)
    return F.scaled_dot_product_attention(*inputs, scale=scale, enable_gqa=is_shared)


# -- attention in transformers' layers ---------------------------------------------------------

Attend = Callable[..., Tensor]
"""(query [1, N, R, D], keys, values, mask, scale=) -> [1, N, R, D]."""
_passing = threading.local()
"""``attend``: attention function for this thread's pass, replacing transformers' own."""


@contextmanager
def attending_by(attend: Attend) -> Iterator[None]:
    # A TorchFunctionMode would work, but is called on every operation: a quarter of a small pass.
    AttentionInterface.register("sdpa", _attend)  # outside of a pass it calls transformers' own
    _passing.attend = attend
    try:
        yield
    finally:
        _passing.attend = None


def shared_heads(config: "PreTrainedConfig", device: torch.device) -> int:
    """Return query heads per key head if attention folds them into rows, else 1."""
    is_folded = device.type == "cuda" and config._attn_implementation == "sdpa"
    return config.num_attention_heads // config.num_key_value_heads if is_folded else 1


def folding_heads(groups: int) -> AbstractContextManager[None]:
    """Context in which masks have ``groups`` times the rows; see ``grouped_attention``."""
    return attending_by(grouped_attention) if groups > 1 else nullcontext()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run transformers' "sdpa", except inside ``attending_by``."""
    attend = getattr(_passing, "attend", None)
    if attend is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    out_1NRD = attend(query, key, value, attention_mask, scale=options.get("scaling"))
    return out_1NRD.transpose(1, 2).contiguous(), None
