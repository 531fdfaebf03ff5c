"""From measured times to the cost model of the virtual clock."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipedraft.errors import UsageError
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import RunRecord, number_or_nan
from pipedraft.inference.clock import CostModel


def read_cost(path: Path) -> CostModel:
    """A cost model's file, as --calibrate writes it."""
    try:
        return CostModel(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"--cost: {str(path)!r} is no cost model ({error}); write one with --calibrate"
        ) from error


def fit_cost(runs: Sequence[RunRecord]) -> CostModel:
    """Fit the cost model to what a comparison measured.

    - A target pass is the stages' mean time for one row, added up, in plain decoding.
    - ``row``, ``sharing``: least squares of the stages' times over calls, further rows, and calls
      times the processes that computed beside them on average, of all methods.
    - ``verify``: a mean verification of one row.
    - ``link``: what plain decoding takes beyond stages and verification, over its n + 1 hops.
      In one process: nothing.
    - ``draft_forward``: drafting time over forward passes, of all methods.

    Args:
        runs: entries of results.json with "processes", one number of stages, plain decoding among
            them.

    Raises:
        ValueError: plain decoding emitted nothing to measure.
    """
    runs = [run for run in runs if run.benchmark == OVERALL] or list(runs)
    plain = next(run for run in runs if run.schedule == AUTOREGRESSIVE)
    if not plain.tokens:
        raise ValueError("--calibrate: plain decoding emitted one token a text; give longer texts")
    num_stages = plain.stages
    one_row = _total(plain, "seconds", "stage") / plain.tokens
    names = [process.name for process in plain.processes]
    is_asynchronous = len(names) > 1
    verify = _total(plain, "seconds", "verify") / plain.tokens
    waits = 0.0
    if is_asynchronous:
        per_token = 1.0 / _tokens_per_s(plain)
        waits = max(per_token - one_row - verify, 0.0) / (num_stages + 1)
    forwards = sum(run.draft_forwards for run in runs)
    drafting = sum(_total(run, "seconds", "draft") for run in runs if run.draft_forwards)
    row, sharing = _row_and_sharing(runs)
    return CostModel(
        row=row,
        sharing=sharing,
        link=waits / one_row,
        verify=verify / one_row,
        draft_forward=drafting / forwards / one_row if forwards else None,
        is_asynchronous=is_asynchronous,
        draft_on_first_stage=is_asynchronous and len(names) == num_stages,
    )


def _total(run: RunRecord, quantity: str, kind: str) -> float:
    return sum(getattr(process, quantity).get(kind, 0.0) for process in run.processes)


def _tokens_per_s(run: RunRecord) -> float:
    assert run.wallclock is not None
    return number_or_nan(run.wallclock.tokens_per_s)


def _row_and_sharing(runs: Sequence[RunRecord]) -> tuple[float, float]:
    """Extra time of a further row, and beside a further busy process, over the time of the first.

    Non-negative least squares; a column that does not vary is left out.
    """
    calls = np.array([_total(run, "counts", "stage") for run in runs])
    rows = np.array([_total(run, "rows", "stage") for run in runs])
    seconds = np.array([_total(run, "seconds", "stage") for run in runs])
    columns = [calls, rows - calls, calls * np.array([_others_busy(run) for run in runs])]
    used = [index for index, column in enumerate(columns) if column.any()]
    while True:
        fitted, *_ = np.linalg.lstsq(
            np.stack([columns[index] for index in used], 1), seconds, rcond=None
        )
        if (fitted >= 0).all() or len(used) == 1:
            break
        used.pop(int(fitted[1:].argmin()) + 1)
    times = dict(zip(used, fitted.tolist(), strict=True))
    first = times[0]
    return (times.get(1, 0.0) / first, times.get(2, 0.0) / first) if first > 0 else (0.0, 0.0)


def _others_busy(run: RunRecord) -> float:
    """Processes that computed beside a busy one on average, while the run lasted."""
    if run.wallclock is None or len(run.processes) == 1:
        return 0.0
    kinds = ("stage", "verify", "draft")
    busy = sum(_total(run, "seconds", kind) for kind in kinds)
    return max(busy * _tokens_per_s(run) / run.tokens - 1.0, 0.0)
