"""Find the best cut of a target into stages for devices with unequal memory and speed."""

import math
from collections.abc import Callable
from functools import cache

from .cost_model import CostModel

AUTO = -1
"""Marks ``--boundaries auto`` until the layer and stage counts are known."""


def read_boundary(text: str | int) -> int:
    """Parse one entry in ``--boundaries``, which is a layer number, auto, or a parsed value."""
    if text in ("auto", AUTO):
        return AUTO
    if not str(text).isdecimal():
        raise ValueError(f"{text!r} is no layer; give ascending layer numbers, 0 first, or auto")
    return int(text)


def cut_layers(
    cost: CostModel, num_layers: int, num_stages: int, *, rows: float = 1
) -> tuple[int, ...]:
    """Cut L layers into n contiguous stages and minimize the longest stage's time.

    Of several such cuts, the one with the lowest latency per token (the sum of the stage times)
    wins. A draft on the first stage's device adds its time and memory there. Link times do not
    depend on the cut.

    Args:
        rows: rows per segment, for the stage times.

    Raises:
        ValueError: too few layers, or too little memory for every cut.
    """
    if cost.stages and len(cost.stages) != num_stages:
        raise ValueError(f"cost.stages: {len(cost.stages)} devices for {num_stages} stages")
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers do not make {num_stages} stages")

    @cache
    def time(stage: int, start: int, end: int) -> float:
        is_first, is_last = stage == 0, stage == num_stages - 1
        has_draft = is_first and cost.draft_on_first_stage
        size = cost.layer_gb * (end - start) + cost.first_gb * is_first + cost.last_gb * is_last
        memory = cost.stages[stage].memory_gb if cost.stages else None
        if memory is not None and size + cost.draft_gb * has_draft > memory:
            return math.inf
        share = cost.share(stage, start, end, num_layers) * cost.growth(stage, rows)
        return share + (cost.draft_forward or 0.0) * has_draft

    # Two passes: the longest stage limits throughput, then the sum breaks ties for latency.
    longest = _best(time, num_layers, num_stages, max, math.inf)[0]
    if longest == math.inf:
        raise ValueError(
            f"no cut of {num_layers} layers of {cost.layer_gb:g} GB fits the stages' memory; give "
            "more of it, or more stages"
        )
    return _best(time, num_layers, num_stages, lambda before, own: before + own, longest)[1]


def _best(
    time: Callable[[int, int, int], float],
    num_layers: int,
    num_stages: int,
    join: Callable[[float, float], float],
    limit: float,
) -> tuple[float, tuple[int, ...]]:
    """Return the smallest combined stage time with no stage above ``limit``, and its cut.

    Args:
        time: returns the time for a stage with layers [start, end).
        join: combines the time so far with the next stage's time, by maximum or sum.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(num_stages):
        # Every later stage needs at least one layer.
        ends = range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        last = stage == num_stages - 1
        best = {
            end: min(
                (join(value, own) if own <= limit else math.inf, (*cut, end))
                for start, (value, cut) in best.items()
                if start < end
                for own in [time(stage, start, end)]
            )
            for end in ([num_layers] if last else ends)
        }
    return best[num_layers]
