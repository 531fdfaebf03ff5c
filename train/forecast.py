"""Forecast a run's acceptance length from its first part, with a measured 90 % interval.

The law: log tau = a + c log(tokens) + g d + l. Acceptance grows as a power of the supervised
tokens (c), and again as the learning rate decays (g, with d the decayed share of the peak rate).
The offset l applies to evaluations only: their difference from training batches (teacher-forced).

A few points from one run do not determine these coefficients. So measured runs (curves.csv) give
the mean and covariance of (c, g, l), the prior for a Bayesian linear regression, and a run's own
points update it. Heads for pipeline stages have a separate prior, because their rounds have no
longest chain. The intervals are widened until they cover the ends of 90 % of the measured runs, at
every share of a run, each forecast with a prior fitted without it.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

import numpy as np

from ..files import Values

# P: points; R: runs; K = 4: coefficients in the order a, c, g, l

CURVES = Path(__file__).with_name("curves.csv")
"""Measured runs for the prior; docs/lab/forecast_curves.py trains them."""
FRACTIONS = (0.02, 0.1, 0.25, 0.5)
"""Shares of a run's steps for its forecasts; one more follows at its end."""
TIMES = (10, 100)
"""Multiples of the run's tokens to forecast besides its end, for ``STAGED`` methods. For other
methods, the measured runs are too short to separate c from g, so a forecast would be a guess."""
COVERAGE = 0.9
"""Share of the measured ends to cover with the intervals."""
WINDOW = 10.0
"""Maximum ratio between tokens now and at the first point used: a curve's beginning says little."""
BINS = 10
"""Bins per factor of ten in tokens; log records are averaged in each bin."""
LEAST = 1e-5
"""Minimum variance of log(length), equal to 0.3 % in length."""
STARTED = 1.2
"""Minimum tokens per round for a point: below, a head has hardly learned and follows no law yet."""
FEWEST = 3
"""Minimum number of training bins for a forecast."""
STAGED = ("spd", "ppsd")
"""Methods without a longest chain in their rounds."""
Kind = Literal["train", "expected", "decoded"]
"""Where a length is measured: training batches, held-out rows (both teacher-forced), or decoded
prompts."""
Vector = np.ndarray


@dataclass(frozen=True)
class Point:
    """Tokens per verification round, measured at one place in a run."""

    kind: Kind
    tokens: int
    """Supervised tokens so far."""
    decayed: float
    """Learning rate decay, 1 - lr / peak lr; 0 during the warm-up."""
    length: float
    """Tokens per verification round, at least 1."""
    noise: float = 0.0
    """Known part of log(length)'s variance."""


@dataclass(frozen=True)
class Curve:
    """A run's points, sorted by tokens."""

    method: str
    points: tuple[Point, ...]

    @property
    def tokens(self) -> int:
        return self.points[-1].tokens

    def until(self, tokens: float) -> Self:
        return type(self)(self.method, tuple(p for p in self.points if p.tokens <= tokens))

    def of(self, kind: Kind) -> list[Point]:
        return [point for point in self.points if point.kind == kind]


@dataclass(frozen=True)
class Interval:
    """A forecast with its 90 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


# -- curves ---------------------------------------------------------------------------------


def length_of(record: Values, prefix: str = "") -> float | None:
    """Return the tokens per round from a record's teacher-forced rates, or None without any.

    With one rate for all draft tokens, the accepted length is geometric.
    """
    if (length := record.get(f"{prefix}acceptance_length_T0")) is not None:
        return length
    rate = record.get(f"{prefix}agreement")
    return None if rate is None else 1 / max(1 - rate, 1e-3)


def points_of(records: Iterable[Values], peak_rate: float) -> Iterator[Point]:
    """Yield the points in a metrics.jsonl's records.

    Args:
        peak_rate: the run's ``optim.lr``.
    """
    decayed, before = 0.0, 0.0
    for record in records:
        if "lr" in record:
            # During the warm-up, the rate is below its peak too, but nothing has decayed yet.
            decayed = max(0.0, 1 - record["lr"] / peak_rate) if record["lr"] < before else decayed
            before = record["lr"]
        kinds: dict[Kind, float | None] = {
            "train": length_of(record),
            "expected": length_of(record, "valid/"),
            "decoded": record.get("valid/decoded_acceptance_length"),
        }
        for kind, length in kinds.items():
            if length is not None and record["tokens"]:
                yield Point(kind, record["tokens"], decayed, max(length, 1.0))


def binned(points: Sequence[Point]) -> list[Point]:
    """Average training points in bins with equal token ratios, and keep the other points.

    Neighbors differ by noise alone, so its variance is half their mean squared difference.
    """
    train = [point for point in points if point.kind == "train"]
    steps = np.diff([math.log(point.length) for point in train])
    noise = float(np.mean(steps**2)) / 2 if len(steps) else 0.0
    bins: dict[int, list[Point]] = defaultdict(list)
    for point in train:
        bins[math.floor(BINS * math.log10(point.tokens))].append(point)
    means = [
        Point(
            "train",
            round(math.exp(np.mean([math.log(p.tokens) for p in group]))),
            float(np.mean([p.decayed for p in group])),
            math.exp(np.mean([math.log(p.length) for p in group])),
            noise / len(group),
        )
        for group in bins.values()
    ]
    kept = [*means, *(point for point in points if point.kind != "train")]
    return sorted(kept, key=lambda point: point.tokens)


def read_curves(path: Path = CURVES) -> dict[str, Curve]:
    """Read the measured runs, by name."""
    points: dict[tuple[str, str], list[Point]] = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            place = int(line["tokens"]), float(line["decayed"]), float(line["length"])
            points[line["run"], line["method"]].append(Point(line["kind"], *place))  # type: ignore[arg-type]
    return {run: Curve(method, tuple(found)) for (run, method), found in points.items()}


# -- the law --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A run's points as inputs for the regression."""

    X_PK: Vector
    """Columns: 1, log(tokens) - origin, decayed, is_evaluated."""
    y_P: Vector
    """log(length)."""
    noise_P: Vector
    """Known part of the variance in y_P."""
    is_evaluated_P: Vector
    """False for bins of training batches."""
    origin: float
    """log(tokens) at age 0, where the coefficient a is the level."""

    @classmethod
    def of(cls, points: Sequence[Point], origin: float) -> Self:
        is_evaluated_P = np.array([point.kind != "train" for point in points])
        ages_P = np.log([point.tokens for point in points]) - origin
        decayed_P = np.array([point.decayed for point in points])
        return cls(
            np.stack([np.ones(len(points)), ages_P, decayed_P, is_evaluated_P], 1),
            np.log([point.length for point in points]),
            np.array([point.noise for point in points]),
            is_evaluated_P,
            origin,
        )


@dataclass(frozen=True)
class Prior:
    """Distribution of (c, g, l) across runs, and the noise around a run's law."""

    mean_K: Vector
    covariance_KK: Vector
    batches: float
    """log(length)'s variance in a bin with training batches, in addition to its known noise."""
    evaluations: float
    """log(length)'s variance in an evaluation."""

    def posterior(self, run: Sample) -> tuple[Vector, Vector]:
        """Return the mean and covariance of a run's own a, c, g and l."""
        variance_P = np.where(run.is_evaluated_P, self.evaluations, self.batches) + run.noise_P
        # a has a flat prior, so its prior precision stays 0.
        precision_KK = np.zeros((4, 4))
        precision_KK[1:, 1:] = np.linalg.inv(self.covariance_KK)
        weighted_KP = run.X_PK.T / variance_P
        covariance_KK = np.linalg.inv(precision_KK + weighted_KP @ run.X_PK)
        pulled_K = precision_KK[:, 1:] @ self.mean_K + weighted_KP @ run.y_P
        return covariance_KK @ pulled_K, covariance_KK


VAGUE = Prior(np.array([0.2, 0.1, 0.0]), 0.04 * np.eye(3), 0.01, 0.01)


def fit_prior(runs: Sequence[Sample], start: Prior = VAGUE, rounds: int = 30) -> Prior:
    """Fit a linear model with random coefficients by expectation maximization."""
    is_evaluated_P = np.concatenate([run.is_evaluated_P for run in runs])
    noise_P = np.concatenate([run.noise_P for run in runs])
    prior = start
    for _ in range(rounds):
        # E-step: each run's own coefficients, given the current prior.
        found = [prior.posterior(run) for run in runs]
        # M-step: spread across runs, plus each run's own uncertainty.
        own_RK = np.array([mean_K[1:] for mean_K, _ in found])
        apart_RK = own_RK - (mean_K := own_RK.mean(0))
        unsure_KK = np.mean([covariance_KK[1:, 1:] for _, covariance_KK in found], 0)
        # Expected squared residuals also include the coefficients' uncertainty.
        square_P = np.concatenate(
            [
                (run.y_P - run.X_PK @ own_K) ** 2
                + np.einsum("pi,ij,pj->p", run.X_PK, covariance_KK, run.X_PK)
                for run, (own_K, covariance_KK) in zip(runs, found, strict=True)
            ]
        )
        square_P = np.maximum(square_P - noise_P, LEAST)
        prior = Prior(
            mean_K,
            unsure_KK + apart_RK.T @ apart_RK / len(runs),
            float(square_P[~is_evaluated_P].mean()),
            float(square_P[is_evaluated_P].mean()),
        )
    return prior


def window(curve: Curve, now: float, kind: Kind, widest: float = WINDOW) -> list[Point]:
    """Return the points used at ``now`` tokens: training bins, and evaluations with ``kind``."""
    places = [p for p in curve.points if now / widest <= p.tokens <= now]
    points = binned([point for point in places if point.kind in ("train", kind)])
    return [point for point in points if point.length >= STARTED]


@dataclass(frozen=True)
class Forecaster:
    """Prior from the measured runs, and the interval width for covering 90 % of them."""

    prior: Prior
    reach: float
    """Half an interval's width, in standard deviations of log(length)."""
    kind: Kind

    @classmethod
    def of(cls, curves: Sequence[Curve], kind: Kind) -> Self:
        """Fit the prior, and measure the reach on each run with a prior from the others."""
        runs = [
            Sample.of(window(c, c.tokens, kind, widest=1 / FRACTIONS[0]), math.log(c.tokens))
            for c in curves
        ]
        prior = fit_prior(runs)
        errors = [
            max(own)
            for index, curve in enumerate(curves)
            if (
                own := cls(fit_prior(runs[:index] + runs[index + 1 :], prior, 3), 1.0, kind).errors(
                    curve
                )
            )
        ]
        # Conformal prediction: times 1 + 1 / n, because the next run's error may be the largest.
        share = min(1.0, COVERAGE * (1 + 1 / len(errors)))
        return cls(prior, float(np.quantile(errors, share, method="higher")), kind)

    def errors(self, curve: Curve) -> list[float]:
        """Return the errors in forecasting the run's end from its parts, in standard deviations."""
        end = curve.of(self.kind)[-1]
        law = [self.law(curve, fraction * curve.tokens) for fraction in FRACTIONS]
        found = [part.predict(end.tokens, end.decayed) for part in law if part is not None]
        return [abs(math.log(end.length) - mean) / deviation for mean, deviation in found]

    def law(self, curve: Curve, now: float) -> "Law | None":
        """Fit the law to the run's points up to ``now`` tokens. Return None for too few points."""
        points = window(curve, now, self.kind)
        if sum(point.kind == "train" for point in points) < FEWEST:
            return None
        origin = math.log(now)
        own = self.prior.posterior(Sample.of(points, origin))
        return Law(*own, origin, self.prior.evaluations)

    def forecast(
        self, curve: Curve, tokens: float, decayed: float, *, now: float, longest: float = math.inf
    ) -> Interval | None:
        """Forecast the length at ``tokens`` from the run's points up to ``now`` tokens.

        Args:
            decayed: 1 - lr / peak lr at ``tokens``.
            longest: tokens in a round with every draft token accepted.
        """
        law = self.law(curve, now)
        return None if law is None else law.interval(tokens, decayed, self.reach, longest)


@dataclass(frozen=True)
class Law:
    """A run's coefficients a, c, g and l, with their covariance."""

    mean_K: Vector
    covariance_KK: Vector
    origin: float
    noise: float
    """log(length)'s variance in an evaluation."""

    def predict(self, tokens: float, decayed: float) -> tuple[float, float]:
        """Return log(length)'s mean and standard deviation in an evaluation."""
        x_K = np.array([1.0, math.log(tokens) - self.origin, decayed, 1.0])
        return float(x_K @ self.mean_K), math.sqrt(x_K @ self.covariance_KK @ x_K + self.noise)

    def interval(self, tokens: float, decayed: float, reach: float, longest: float) -> Interval:
        mean, deviation = self.predict(tokens, decayed)
        ends = (math.exp(mean + side * reach * deviation) for side in (0, -1, 1))
        return Interval(*(min(max(end, 1.0), longest) for end in ends))


# -- in a run -------------------------------------------------------------------------------


def alike(curves: Iterable[Curve], method: str, kind: Kind) -> list[Curve]:
    """Return the runs to learn from: methods like this one, with lengths from this source."""
    is_staged = method in STAGED
    return [c for c in curves if (c.method in STAGED) == is_staged and c.of(kind)]


@cache
def forecaster(method: str, kind: Kind) -> Forecaster:
    """Return the forecaster fitted to the shipped runs (cached)."""
    return Forecaster.of(alike(read_curves().values(), method, kind), kind)


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """Forecasts for one run, from its own log records."""

    method: str
    kind: Kind
    peak_rate: float
    """The run's ``optim.lr``."""
    final_decay: float
    """1 - lr / peak lr at the last step."""
    num_steps: int
    longest: float
    """Tokens in a round with every draft token accepted."""
    is_first: bool = True
    """False for a run from a trained head: the tokens that it has read before are unknown."""

    def is_due(self, before: int, step: int) -> bool:
        """Return True if a forecast is due at ``step``, after a record at ``before``."""
        return any(before < fraction * self.num_steps <= step for fraction in FRACTIONS)

    def figures(self, records: Sequence[Values]) -> dict[str, float]:
        """Return the forecasts' log entries, or {} if there are too few records, or the run is not
        the head's first.

        Entries are ``forecast/end``, ``forecast/10x`` and ``forecast/100x``, each also with
        ``_low`` and ``_high``. At the end, ``forecast/end`` is left out. Only ``STAGED`` methods
        have the other two.
        """
        step, tokens = records[-1]["step"], records[-1]["tokens"]
        curve = Curve(self.method, tuple(points_of(records, self.peak_rate)))
        made = forecaster(self.method, self.kind)
        law = made.law(curve, tokens) if tokens and self.is_first else None
        if law is None:
            return {}
        found: dict[str, float] = {}
        further = TIMES if self.method in STAGED else ()
        for times in (1, *further)[step == self.num_steps :]:
            at = times * tokens * self.num_steps / step
            interval = law.interval(at, self.final_decay, made.reach, self.longest)
            name = "forecast/end" if times == 1 else f"forecast/{times}x"
            found |= {name: interval.value, f"{name}_low": interval.low}
            found[f"{name}_high"] = interval.high
        return found


def told(figures: Values, kind: Kind) -> str:
    """Format a forecast's log entries as one line."""
    name = "tau" if kind == "decoded" else "expected tau"
    parts = [
        f"{name} {Interval(*(figures[key + end] for end in ('', '_low', '_high')))} {where}"
        for key, where in (
            ("forecast/end", "at the end"),
            *((f"forecast/{times}x", f"with {times} times the tokens") for times in TIMES),
        )
        if key in figures
    ]
    return f"forecast (with 90 % intervals): {', '.join(parts)}"
