"""Say how many tokens and conversations a wished acceptance length needs, for ``--plan``.

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
"""Most times a curve's tokens that a wish may need."""
SAMPLED = 500
"""Rows of each source to count tokens in, which takes a second."""


@dataclass(frozen=True)
class Wish:
    """A wished length, and where to read how it grows."""

    length: float
    """Tokens per round."""
    folder: Path | None = None
    """An earlier run's output_dir; None: the measured runs that ship."""

    def curve(self, method: str) -> tuple[Curve, str]:
        """Return the run's curve and its name.

        Raises:
            UsageError: no such run, or another method's.
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
            UsageError: as in ``curve``, a method that is not ``STAGED``, or the run is too short.
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
    """Return the tokens of a run that reaches ``length``, and the ends of their 90 % interval.

    Each is infinite if the forecast stays below ``length`` up to ``FARTHEST`` times the curve.

    Args:
        decayed: 1 - learning rate over its peak, at the run's end.
    """
    law = by.law(curve, curve.tokens)
    assert law is not None
    tokens_N = curve.tokens * np.geomspace(1 / FARTHEST, FARTHEST, 2001)
    found = [law.predict(tokens, decayed) for tokens in tokens_N]
    mean_N, deviation_N = (np.array(column) for column in zip(*found, strict=True))
    ends: list[float] = []
    for side in (0, 1, -1):
        reached_N = mean_N + side * by.reach * deviation_N >= math.log(length)
        ends.append(float(tokens_N[reached_N.argmax()]) if reached_N.any() else math.inf)
    return ends


def conversation_tokens(run: RunConfig) -> float | None:
    """Return the mean supervised tokens of a conversation in the run's files.

    Returns:
        None for data on the Hub, and for a target without its tokenizer.
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
    """Write 1234567 as 1.2 M, and infinity in words."""
    if number == math.inf:
        return "out of reach"
    for unit, letter in ((1e9, " G"), (1e6, " M"), (1e3, ",000")):
        if number >= unit:
            digits = 1 if letter != ",000" and number < 10 * unit else 0
            return f"{number / unit:.{digits}f}{letter}"
    return f"{number:.0f}"


def spread(numbers: list[float], unit: str) -> str:
    value, low, high = map(short, numbers)
    value = value if numbers[0] == math.inf else f"about {value}{unit}"
    return f"{value} (90 %: {low} to {high})"
