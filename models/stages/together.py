"""Run a stage's layers once for several sequences.

Their rows are concatenated without padding, so projections and MLPs read their weights only once.
Attention runs for each sequence over its own cache, or with ``bitwise`` for each row.
"""

# l rows in a segment, R rows of all segments, H hidden, C cache rows, S mask columns
# N query heads, J key heads, D head size

import logging
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..speed import kernels
from ..speed.attending import Attend, attending_by, masked
from ..transformer.decoder import has_latents
from ..transformer.layers import grouped_attention
from ..transformer.stage_cache import Abandoned, Segment
from .bitwise import RowByRow, pad, row_by_row, rows_of_a_pass
from .stage_layers import StageLayers

logger = logging.getLogger(__name__)


def log_failed_pass(what: str, error: Exception) -> None:
    """Log once per reason that several sequences could not share a pass, so each runs alone."""
    _log_once(what, f"{type(error).__name__}: {error}"[:300])


@lru_cache(maxsize=64)
def _log_once(what: str, reason: str) -> None:
    logger.warning("%s of several sequences run alone, which is slower: %s", what, reason)


def can_run_together(stage: StageLayers) -> bool:
    """Return True if rows of several sequences can share a pass.

    They cannot with recurrent layers, ``bitwise``, latent caches, or attention other than "sdpa".
    """
    if stage.cache.recurrent_layers or stage.is_bitwise:
        return False
    config = stage.config
    return config._attn_implementation == "sdpa" and not has_latents(config)


@torch.inference_mode()
def forward_together(
    stages: Sequence[StageLayers],
    segments: Sequence[Segment],
    taps: Collection[int] = (),
    is_wanted: Callable[[], bool] | None = None,
) -> list[Segment]:
    """Run several sequences' stages at once, and append their rows as speculative.

    Results equal those of separate runs up to rounding, or bit for bit with rounded weights.

    Args:
        stages: the same layers in the same model, each with its own cache.
        taps: layer indices, the same for all segments.
        is_wanted: called before every layer.

    Raises:
        Abandoned: ``is_wanted`` returned False. The segments count as not run.
    """
    first = stages[0]
    assert all(stage.layers[0] is first.layers[0] for stage in stages), "one model's stages"
    caches = [stage.cache for stage in stages]
    sizes = [segment.num_rows for segment in segments]
    own_positions = [segment.positions.to(first.device) for segment in segments]
    # Every sequence has its own cache; the rows pass the layers side by side.
    known = [cache.begin(p) for cache, p in zip(caches, own_positions, strict=True)]
    parts = [
        stage.enter(segment.ids if stage.embedding is not None else segment.hidden)
        for stage, segment in zip(stages, segments, strict=True)
    ]
    rows_RH, positions_R = torch.cat(parts), torch.cat(own_positions)
    attending: list[_Masked | RowByRow] = [
        row_by_row(stage, segment.visible.to(first.device))
        if stage.is_bitwise
        else _Masked(stage, segment, positions_C, rows_RH.dtype)
        for stage, segment, positions_C in zip(stages, segments, known, strict=True)
    ]
    # Weights are read once for all rows; attention runs per sequence.
    apart = _Apart(attending, sizes) if len(attending) > 1 else attending[0]
    if first.is_bitwise:
        rows_RH, positions_R = pad(rows_RH), pad(positions_R)
    hidden_1RH = rows_RH[None]
    # Never read; without a mask transformers would create a causal one.
    unused_mask = hidden_1RH.new_zeros(1, 1, 1, len(rows_RH))
    calls = first.plain.calls(
        len(rows_RH),
        places=first.places(hidden_1RH, positions_R, first.kinds),
        cache=apart,
        attends=dict.fromkeys(first.kinds, apart.attend),
        masks=dict.fromkeys(first.kinds, unused_mask),
    )
    outputs = {0: rows_RH} if first.start == 0 and 0 in taps else {}
    with attending_by(apart.attend):
        passes = zip(calls, first.kinds, strict=True)
        for index, (call, kind) in enumerate(passes, start=first.start + 1):
            if is_wanted is not None and not is_wanted():
                raise Abandoned
            apart.enter(kind)
            hidden_1RH = call(hidden_1RH)
            if index in taps:
                outputs[index] = hidden_1RH[0]
    for cache in caches:
        cache.advance(committed=False)
    # A padded pass has more rows than the sequences.
    hidden = hidden_1RH[0, : sum(sizes)].split(sizes)
    tapped = {index: x_RH[: sum(sizes)].split(sizes) for index, x_RH in outputs.items()}
    return [
        segment.after(hidden_lH, {index: parts[place] for index, parts in tapped.items()})
        for place, (segment, hidden_lH) in enumerate(zip(segments, hidden, strict=True))
    ]


def forward_bitwise(stage: StageLayers, segment: Segment, taps: Collection[int]) -> Segment:
    """Run a segment in passes of ``rows_of_a_pass`` rows, as ``bitwise.py`` explains."""
    outs: list[Tensor] = []
    tapped: dict[int, list[Tensor]] = {}
    for rows_l in torch.arange(segment.num_rows).split(rows_of_a_pass(stage.device)):
        seen_lS = segment.visible[rows_l, : segment.lo + int(rows_l[-1]) + 1]
        ids, hidden = (x if x is None else x[rows_l] for x in (segment.ids, segment.hidden))
        part = Segment(segment.positions[rows_l], seen_lS, ids, hidden)
        (after,) = forward_together([stage], [part], taps)
        assert after.hidden is not None
        outs.append(after.hidden)
        for index, rows_lH in after.taps.items():
            tapped.setdefault(index, []).append(rows_lH)
    collected = {index: torch.cat(parts) for index, parts in tapped.items()}
    return segment.after(torch.cat(outs), collected)


class _Masked:
    """Cache stand-in for one sequence. All rows attend in one call behind a mask."""

    def __init__(
        self, stage: StageLayers, segment: Segment, positions_C: Tensor, dtype: torch.dtype
    ) -> None:
        self._cache = stage.cache
        self._attend: Attend = grouped_attention if stage.groups > 1 else masked
        if stage.is_rounded:
            self._attend = kernels.attend  # a row's bits do not depend on the other rows
        self._known: tuple[Tensor, Tensor] | None = None
        self._kind = ""
        visible_lS = segment.visible.to(stage.device)
        self._masks: dict[str, Any] = stage.masks(visible_lS, positions_C, dtype)

    def enter(self, kind: str) -> None:
        self._kind = kind

    def update(
        self, keys_1JlD: Tensor, values_1JlD: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        self._known = self._cache.update(keys_1JlD, values_1JlD, layer_idx)
        return keys_1JlD, values_1JlD

    def attend(self, query_1NlD: Tensor, *_: Tensor, scale: float | None) -> Tensor:
        assert self._known is not None, "the layer's keys come first"
        return self._attend(query_1NlD, *self._known, self._masks[self._kind], scale)


class _Apart:
    """Cache stand-in that splits the rows by sequence, so each attends to its own cache."""

    def __init__(self, parts: Sequence[_Masked | RowByRow], sizes: Sequence[int]) -> None:
        self._parts, self._sizes = parts, list(sizes)

    def enter(self, kind: str) -> None:
        for part in self._parts:
            part.enter(kind)

    def update(
        self, keys_1JRD: Tensor, values_1JRD: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        pairs = (x.split(self._sizes, 2) for x in (keys_1JRD, values_1JRD))
        for part, keys, values in zip(self._parts, *pairs, strict=True):
            part.update(keys, values, layer_idx)
        return keys_1JRD, values_1JRD

    def attend(self, query_1NRD: Tensor, *_: Tensor, scale: float | None) -> Tensor:
        """Return the attention's results [1, N, R, D] in sequence order."""
        queries = query_1NRD.split(self._sizes, 2)
        outs = [p.attend(q, scale=scale) for p, q in zip(self._parts, queries, strict=True)]
        return torch.cat(outs, 2)
