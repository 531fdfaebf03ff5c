"""Estimate the tokens and conversations for a wished acceptance length, for ``--plan``.

python -m pipedraft.train --plan configs/spd/quickstart.yaml --wish-tau 3.5 --curve out/eagle3
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..data_recipes.recipe import load_data
from ..data_recipes.sources import list_files
from ..errors import UsageError
from ..files import packaged, read_yaml
from .config import RunConfig
from .forecast import STAGED, Curve, Forecaster, Kind, forecaster, points_of, read_curves
from .run import load_tokenizer_of

FARTHEST = 1e4
"""Maximum multiple of a curve's tokens for a wish."""
SAMPLED = 500
"""Rows per source for counting tokens; they take a second."""


@dataclass(frozen=True)
class Wish:
    """A wished acceptance length, and the run with the learning curve for it."""

    length: float
    """Tokens per verification round."""
    folder: Path | None = None
    """An earlier run's output_dir; None: the longest shipped run with the same method."""

    def curve(self, method: str) -> tuple[Curve, str]:
        """Return the learning curve and its name.

        Raises:
            UsageError: the folder is no run, or a run with another method.
        """
        if self.folder is None:
            runs = {name: c for name, c in read_curves().items() if c.method == method}
            name = max(runs, key=lambda name: runs[name].tokens)
            return runs[name], f"our run {name} on the embedded target"
        log, settings = self.folder / "metrics.jsonl", self.folder / "config.yaml"
        if not log.is_file() or not settings.is_file():
            raise UsageError(f"--curve: {str(self.folder)!r} is no run; give a run's output_dir")
        run = read_yaml(settings, "--curve")
        if run["method"] != method:
            raise UsageError(
                f"--curve: {str(self.folder)!r} is a run of {run['method']}, and this plan is for "
                f"{method}; give a run of {method}"
            )
        records = map(json.loads, log.read_text().splitlines())
        points = tuple(points_of(records, run["optim"]["lr"]))
        return Curve(method, points), str(self.folder)

    def lines(self, run: RunConfig) -> Iterator[str]:
        """Yield the plan's lines.

        Raises:
            UsageError: as in ``curve``; or the method is not ``STAGED``, or the run is too short.
        """
        if run.method not in STAGED:
            raise UsageError(
                f"--wish-tau: {self.length:g} for {run.method}, but the measured runs can forecast "
                f"more text only for {' and '.join(STAGED)}; leave it out"
            )
        curve, name = self.curve(run.method)
        kind: Kind = "decoded" if curve.of("decoded") else "expected"
        made = forecaster(run.method, kind)
        if not curve.points or made.law(curve, curve.tokens) is None:
            raise UsageError(f"--curve: {str(self.folder)!r} is too short; give a longer run")
        decayed = float(run.optim.schedule != "constant") * (1 - run.optim.final_fraction)
        tokens = tokens_for(self.length, curve, made, decayed)
        yield ""
        yield (
            f"tau {self.length:g}, {kind}: {spread(tokens, ' supervised tokens')}, by the curve of "
            f"{name} ({short(curve.tokens)} tokens)"
        )
        each = conversation_tokens(run)
        if each is not None:
            counts = [number / each for number in tokens]
            yield f"{spread(counts, ' conversations')}, of {each:.0f} supervised tokens each"
        if self.folder is None:
            yield "another target learns otherwise: give --curve FOLDER of a short run on yours"


def tokens_for(length: float, curve: Curve, by: Forecaster, decayed: float) -> list[float]:
    """Return the tokens needed for ``length``, and the ends of their 90 % interval.

    A value is infinite if the forecast stays below ``length`` up to ``FARTHEST`` times the curve.

    Args:
        decayed: 1 - lr / peak lr at the run's end.
    """
    law = by.law(curve, curve.tokens)
    assert law is not None
    # Invert the law on a logarithmic grid: the first token count whose forecast is long enough.
    tokens_N = curve.tokens * np.geomspace(1 / FARTHEST, FARTHEST, 2001)
    found = [law.predict(tokens, decayed) for tokens in tokens_N]
    mean_N, deviation_N = (np.array(column) for column in zip(*found, strict=True))
    ends: list[float] = []
    for side in (0, 1, -1):
        reached_N = mean_N + side * by.reach * deviation_N >= math.log(length)
        ends.append(float(tokens_N[reached_N.argmax()]) if reached_N.any() else math.inf)
    return ends


def conversation_tokens(run: RunConfig) -> float | None:
    """Return the mean supervised tokens per conversation in the run's files.

    Returns:
        None for data on the Hub, or for a target without a tokenizer.
    """
    place = Path(packaged(str(run.target)))
    has_tokenizer = not place.is_dir() or (place / "tokenizer_config.json").is_file()
    if not has_tokenizer or any(list_files(source) is None for source in run.data.sources):
        return None
    sources = [
        replace(source, max_rows=min(SAMPLED, source.max_rows or SAMPLED))
        for source in run.data.sources
    ]
    sample = replace(run.data, sources=sources, valid_fraction=0.0)
    rows = load_data(sample, load_tokenizer_of(run)).train
    return sum(sum(mask) for mask in rows["loss_mask"]) / len(rows)


def short(number: float) -> str:
    """Write 1234567 as 1.2 M, 80543 as 81,000, and infinity in words."""
    if number == math.inf:
        return "out of reach"
    for unit, letter in ((1e9, " G"), (1e6, " M")):
        if number >= 0.9995 * unit:  # 999,500 would be rounded to 1,000,000
            return f"{number / unit:.{int(number < 10 * unit)}f}{letter}"
    return f"{round(number, -3):,.0f}" if number >= 1e3 else f"{number:.0f}"


def spread(numbers: list[float], unit: str) -> str:
    """Format a value with its 90 % interval."""
    value, low, high = map(short, numbers)
    value = value if numbers[0] == math.inf else f"about {value}{unit}"
    return f"{value} (90 %: {low} to {high})"
