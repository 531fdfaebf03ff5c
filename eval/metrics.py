"""The one definition of every reported number. Counts are pooled; ratios are computed at the end.

The unit of resampling is a conversation: steps inside one are dependent, and so are its turns.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from pipedraft.eval.record import AcceptanceLength, LosslessRecord, RunRecord, WallClockRecord
from pipedraft.inference.result import DecodeResult

AUTOREGRESSIVE = "autoregressive"
"""Schedule and method name of the baseline."""
OVERALL = "overall"
"""In place of a benchmark: all of them pooled."""
# P conversations, R bootstrap resamples.
CONFIDENCE = 0.95
NUM_RESAMPLES = 2000


def student_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t, from the normal one z.

    z + g1(z) / d + g2(z) / d^2 + g3(z) / d^3 + g4(z) / d^4    Abramowitz and Stegun 26.7.5
    At 0.975 it is 0.7 % low for d = 2, 0.01 % for d = 5, and exact to six digits from d = 15.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def resampling_weights(
    size: int, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> np.ndarray:
    """[P, R]: how often each of ``size`` conversations is drawn in each resample.

    Whole numbers as float64: sums over conversations stay exact.
    """
    rng = np.random.default_rng(seed)
    weights_RP = rng.multinomial(size, np.full(size, 1 / size), size=num_resamples)
    return weights_RP.T.astype(np.float64)


def effective_size(weight_P: np.ndarray) -> np.ndarray:
    """[...]: how many equally heavy conversations say as much; sum(w)^2 / sum(w^2), Kish 1965."""
    with np.errstate(invalid="ignore"):
        return weight_P.sum(-1) ** 2 / (weight_P**2).sum(-1)


def expanded_percentiles(values_R: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Confidence interval of a statistic from its resampled values.

    Expanded percentile interval (Hesterberg 2015, arXiv:1411.5279): the percentiles a and 1 - a of
    the resampled values, a = Phi(-sqrt(P / (P - 1)) t), t = 0.975 quantile of Student's t with
    P - 1 degrees of freedom. The plain 2.5 % percentiles cover too seldom with few conversations.
    Deviation: P is the effective number of conversations; a few long ones weigh like few.

    Of ratios of sums over 8 to 80 prompts with log-normal lengths (sigma 0.5 to 1.5) and of their
    differences between two runs it covers the truth in 93 to 98 %. With the plain P it does in 91
    to 95 %, BCa in 83 to 94 %, the bootstrap-t in 87 to 96 %, the delta method in 78 to 95 %.

    Args:
        values_R: [..., R].
        size: [...], see ``effective_size``.

    Returns:
        [..., 2]: lower and upper bound; NaN where P is 1, since one prompt has no spread.
    """
    bounds = np.full((*values_R.shape[:-1], 2), np.nan)
    for place, effective in np.ndenumerate(size):
        if effective > 1:
            effective = max(effective, 2.0)
            t = student_quantile((1 + CONFIDENCE) / 2, effective - 1)
            tail = NormalDist().cdf(-math.sqrt(effective / (effective - 1)) * t)
            bounds[place] = np.quantile(values_R[place], [tail, 1 - tail])
    return bounds


def bootstrap_ratio(
    numerator_P: np.ndarray,
    denominator_P: np.ndarray,
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> np.ndarray:
    """Confidence interval of sum(numerator) / sum(denominator), resampling conversations.

    Args:
        numerator_P: [..., P]; leading axes are independent experiments.
        denominator_P: same shape, positive.

    Returns:
        [..., 2]: see ``expanded_percentiles``.
    """
    numerator_P = np.asarray(numerator_P, dtype=np.float64)
    denominator_P = np.asarray(denominator_P, dtype=np.float64)
    size = numerator_P.shape[-1]
    if size < 2:
        return np.full((*numerator_P.shape[:-1], 2), np.nan)
    weights_PR = resampling_weights(size, seed=seed, num_resamples=num_resamples)
    ratio_R = (numerator_P @ weights_PR) / (denominator_P @ weights_PR)
    return expanded_percentiles(ratio_R, effective_size(denominator_P))


def sum_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    """Element-wise sum of lists of different lengths."""
    total = [0] * max((len(values) for values in lists), default=0)
    for values in lists:
        for index, value in enumerate(values):
            total[index] += value
    return total


def ratio(numerator: float, denominator: float) -> float:
    """NaN, not an error, where nothing was counted."""
    return numerator / denominator if denominator else math.nan


@dataclass(frozen=True, kw_only=True)
class WallClock:
    """Measured times of one process; never derived from steps or a cost model."""

    tokens_per_s: float
    """N over the time between the first and the last token of each request; prefill excluded."""
    ttft_ms: float
    """Median time from the request to its first token."""
    itl_ms_p50: float
    """Median time between successive tokens, pooled over requests; 0 inside an accepted burst."""
    itl_ms_p99: float

    @classmethod
    def measure(cls, results: Sequence[DecodeResult]) -> "WallClock | None":
        """None when no request recorded two token times."""
        times = [np.asarray(r.token_times_s) for r in results if len(r.token_times_s) > 1]
        if not times:
            return None
        gaps = np.concatenate([np.diff(t) for t in times])
        itl_ms_p50, itl_ms_p99 = np.quantile(gaps, [0.5, 0.99]) * 1e3
        first = [r.token_times_s[0] for r in results if r.token_times_s]
        return cls(
            tokens_per_s=ratio(len(gaps), float(gaps.sum())),
            ttft_ms=float(np.median(first)) * 1e3,
            itl_ms_p50=float(itl_ms_p50),
            itl_ms_p99=float(itl_ms_p99),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a set of conversations says about one method."""

    num_stages: int
    num_prompts: int
    """Conversations; the turns of one are pooled."""
    num_turns: int
    num_tokens: int
    """N, the prefill tokens excluded."""
    num_steps: int
    """K, idle and rejecting steps included."""
    pooled: float
    """L' = n sum(N) / sum(K)."""
    mean: float
    """Mean over conversations of n N / K; those that stopped on the prefill token have none."""
    ci95: tuple[float, float]
    """Of ``pooled``, bootstrap over conversations; NaN for a single one."""
    mean_acceptance_length: float
    """tau: tokens per round, the correction or bonus token included."""
    draft_acceptance_rate: float
    """alpha: accepted over tested draft tokens."""
    theoretical_speedup: float
    """S = sum(T_AR) / sum(T) under the engine's cost model."""
    num_rounds: int
    acceptance_histogram: list[int]
    """Entry j: rounds that emitted j tokens. Sums to ``num_rounds``."""
    position_tests: list[int]
    position_accepts: list[int]
    num_drafted: int
    num_draft_forwards: int
    wallclock: WallClock | None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry j: share accepted of the draft tokens tested as j-th token of their round."""
        pairs = zip(self.position_accepts, self.position_tests, strict=True)
        return [ratio(accepts, tests) for accepts, tests in pairs]


def summarize(
    results: Sequence[DecodeResult],
    *,
    conversations: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> Summary:
    """Pool decoded turns of one method.

    Args:
        results: one per turn, all with the same number of stages.
        conversations: which conversation each result belongs to; None: every result is its own.
        seed: of the bootstrap.
    """
    stages = {result.num_stages for result in results}
    if len(stages) != 1:
        raise ValueError(f"results: num_stages {sorted(stages)}; pool one number of stages only")
    num_stages = stages.pop()
    keys = range(len(results)) if conversations is None else conversations
    counts: dict[Hashable, tuple[int, int]] = {}
    for key, result in zip(keys, results, strict=True):
        tokens, steps = counts.get(key, (0, 0))
        counts[key] = (tokens + result.num_tokens, steps + result.num_steps)
    decoded = [(num_stages * tokens, steps) for tokens, steps in counts.values() if steps]
    numerator_P, denominator_P = np.array(decoded, dtype=np.float64).reshape(-1, 2).T
    low, high = bootstrap_ratio(numerator_P, denominator_P, seed=seed)
    rounds = [length for result in results for length in result.round_lengths]
    tests = sum_lists([result.position_tests for result in results])
    accepts = sum_lists([result.position_accepts for result in results])
    time = sum(result.virtual_time for result in results)
    time_autoregressive = sum(result.virtual_time_autoregressive for result in results)
    return Summary(
        num_stages=num_stages,
        num_prompts=len(counts),
        num_turns=len(results),
        num_tokens=sum(tokens for tokens, _ in counts.values()),
        num_steps=sum(steps for _, steps in counts.values()),
        pooled=ratio(float(numerator_P.sum()), float(denominator_P.sum())),
        mean=float((numerator_P / denominator_P).mean()) if decoded else math.nan,
        ci95=(float(low), float(high)),
        mean_acceptance_length=ratio(sum(rounds), len(rounds)),
        draft_acceptance_rate=ratio(sum(accepts), sum(tests)),
        theoretical_speedup=ratio(time_autoregressive, time),
        num_rounds=len(rounds),
        acceptance_histogram=np.bincount(rounds).tolist() if rounds else [],
        position_tests=tests,
        # As long as position_tests, also when nothing was accepted at the last positions.
        position_accepts=accepts + [0] * (len(tests) - len(accepts)),
        num_drafted=sum(result.num_drafted for result in results),
        num_draft_forwards=sum(result.num_draft_forwards for result in results),
        wallclock=WallClock.measure(results),
    )


def run_record(
    summary: Summary, *, autoregressive: Summary | None = None, **fields: Any
) -> RunRecord:
    """One entry of results.json. Values that do not exist are NaN here and null in the file.

    Args:
        autoregressive: the baseline of the same benchmark and temperature in the same process,
            for the wall-clock speedup.
        fields: of the record, what was run among them, and what is not of the summary.
    """
    wallclock = None
    if summary.wallclock is not None:
        speedup = math.nan
        if autoregressive is not None and autoregressive.wallclock is not None:
            speedup = ratio(summary.wallclock.tokens_per_s, autoregressive.wallclock.tokens_per_s)
        wallclock = WallClockRecord(**vars(summary.wallclock), speedup=speedup)
    known: dict[str, Any] = {
        "stages": summary.num_stages,
        "prompts": summary.num_prompts,
        "tokens": summary.num_tokens,
        "steps": summary.num_steps,
        "equivalent_acceptance_length": AcceptanceLength(
            pooled=summary.pooled, mean=summary.mean, ci95=summary.ci95
        ),
        "mean_acceptance_length": summary.mean_acceptance_length,
        "draft_acceptance_rate": summary.draft_acceptance_rate,
        "theoretical_speedup": summary.theoretical_speedup,
        "wallclock": wallclock,
        "lossless": LosslessRecord(checked=0, mismatches=0),
        "turns": summary.num_turns,
        "rounds": summary.num_rounds,
        "acceptance_histogram": summary.acceptance_histogram,
        "acceptance_by_position": summary.acceptance_by_position,
        "position_tests": summary.position_tests,
        "position_accepts": summary.position_accepts,
        "drafted": summary.num_drafted,
        "draft_forwards": summary.num_draft_forwards,
    }
    return RunRecord(**({"tree": None} | known | fields))
