"""Confidence intervals of ratios of sums over conversations, and two runs on the same prompts.

Every quantity is such a ratio: L' = n sum(N) / sum(K), S, tokens per second, acceptance. The unit
of resampling is a conversation: steps inside one are dependent, and so are its turns.
"""

# P conversations, R resamples or patterns of swaps, S the two runs (0 the baseline, 1 the one
# compared with it), M repeats. Leading axes (...) are independent experiments.
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
POWER = 0.8
EXACT_PROMPTS = 12
"""Up to this many prompts every pattern of swaps is enumerated (4096 of them)."""
NUM_PERMUTATIONS = 10_000
RELATIVE_DIFFERENCES = (0.01, 0.02, 0.05)
"""Differences, as shares of the baseline, for which the number of prompts is worked out."""
NORMAL = NormalDist()
LEVEL = (1 + CONFIDENCE) / 2


def student_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t, from the normal one z.

    z + g1(z) / d + g2(z) / d^2 + g3(z) / d^3 + g4(z) / d^4    Abramowitz and Stegun 26.7.5
    At 0.975 it is 0.7 % low for d = 2, 0.01 % for d = 5, and exact to six digits from d = 15.
    """
    z = NORMAL.inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def resampling_weights(size: int, *, seed: int) -> np.ndarray:
    """How often each of ``size`` conversations is drawn in each resample, [P, R].

    Whole numbers as float64: sums over conversations stay exact.
    """
    rng = np.random.default_rng(seed)
    weights_RP = rng.multinomial(size, np.full(size, 1 / size), size=NUM_RESAMPLES)
    return weights_RP.T.astype(np.float64)


def effective_size(weight_P: np.ndarray) -> np.ndarray:
    """How many equally heavy conversations say as much: sum(w)^2 / sum(w^2), Kish 1965; [...]."""
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
            t = student_quantile(LEVEL, effective - 1)
            tail = NORMAL.cdf(-math.sqrt(effective / (effective - 1)) * t)
            bounds[place] = np.quantile(values_R[place], [tail, 1 - tail])
    return bounds


def bootstrap_ratio(
    numerator_P: np.ndarray, denominator_P: np.ndarray, *, seed: int = 0
) -> np.ndarray:
    """Confidence interval [..., 2] of sum(numerator) / sum(denominator), resampling conversations.

    Args:
        numerator_P: [..., P].
        denominator_P: same shape, positive.
    """
    numerator_P = np.asarray(numerator_P, dtype=np.float64)
    denominator_P = np.asarray(denominator_P, dtype=np.float64)
    size = numerator_P.shape[-1]
    if size < 2:
        return np.full((*numerator_P.shape[:-1], 2), np.nan)
    weights_PR = resampling_weights(size, seed=seed)
    ratio_R = (numerator_P @ weights_PR) / (denominator_P @ weights_PR)
    return expanded_percentiles(ratio_R, effective_size(denominator_P))


def wilson_over_prompts(accepts_P: np.ndarray, tests_P: np.ndarray) -> tuple[float, float]:
    """95 % interval of sum(accepts) / sum(tests) where the tests of a prompt are dependent.

    Wilson's interval with the effective number of tests p (1 - p) / v, where v is the jackknife's
    variance of the rate over prompts, and Student's t in place of z (after Korn and Graubard 1998,
    Survey Methodology 24). Where v is 0, that is where all or none were accepted, every prompt
    counts as one test.
    Deviation: theirs widens Clopper and Pearson's interval, which is wider than 95 % asks for;
    their variance is linearized, and their degrees of freedom take prompts for equally long.

    From 10 prompts up, with log-normal numbers of tests (sigma 0.7 to 1.5), it covers the truth in
    91 to 99 %; Wilson's own interval, which takes the tests for independent, in 47 to 95 %. Unlike
    a bootstrap it does not shrink to a point where the few prompts that reach a position accept
    everything there. With 3 prompts it is cautious.

    Args:
        accepts_P: prompts without a test are left out.

    Returns:
        NaN with fewer than two prompts.
    """
    accepts_P, tests_P = accepts_P[tests_P > 0], tests_P[tests_P > 0]
    size = len(tests_P)
    if size < 2:
        return math.nan, math.nan
    num_tests = float(tests_P.sum())
    rate = float(accepts_P.sum()) / num_tests
    without_P = (accepts_P - rate * tests_P) / (num_tests - tests_P)
    variance = (size - 1) / size * float((without_P**2).sum())
    alike = float(effective_size(tests_P.astype(np.float64)))
    effective = min(rate * (1 - rate) / variance, num_tests) if variance > 0 else alike
    return _wilson(rate, effective, student_quantile(LEVEL, max(alike - 1, 1.0)))


def wilson_interval(passed: int, total: int) -> tuple[float, float]:
    """Confidence interval of a share, by Wilson 1927, eq. 4; NaN for total = 0.

    Deviation: none.
    """
    return _wilson(passed / total, total, NORMAL.inv_cdf(LEVEL)) if total else (math.nan, math.nan)


def _wilson(share: float, size: float, z: float) -> tuple[float, float]:
    """((p + z^2 / 2n) +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), inside [0, 1]."""
    center = share + z * z / (2 * size)
    spread = z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    scale = 1 + z * z / size
    low = max(0.0, (center - spread) / scale) if share > 0 else 0.0
    return low, min(1.0, (center + spread) / scale) if share < 1 else 1.0


# -- two runs on the same prompts ------------------------------------------------------------------


def pooled(numerator_SP: np.ndarray, denominator_SP: np.ndarray) -> np.ndarray:
    """Ratios of sums over conversations, [..., S]; NaN where nothing was counted."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return numerator_SP.sum(-1) / denominator_SP.sum(-1)


def paired_intervals(
    numerator_SP: np.ndarray, denominator_SP: np.ndarray, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Intervals [..., 2] of the difference and of the ratio of the two pooled values.

    A resample draws prompts with what both runs did on them: what makes a prompt long or easy for
    both cancels.
    """
    weights_PR = resampling_weights(numerator_SP.shape[-1], seed=seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        share_SP = denominator_SP / denominator_SP.sum(-1, keepdims=True)
        value_SR = (numerator_SP @ weights_PR) / (denominator_SP @ weights_PR)
        baseline_R, compared_R = value_SR[..., 0, :], value_SR[..., 1, :]
        ratio_R = compared_R / baseline_R
    size = effective_size(share_SP.mean(-2))
    return (
        expanded_percentiles(compared_R - baseline_R, size),
        expanded_percentiles(ratio_R, size),
    )


def influence(numerator_SP: np.ndarray, denominator_SP: np.ndarray) -> np.ndarray:
    """What each prompt contributes to the difference of the pooled values, [..., P].

    psi_i = (a_1i - r_1 b_1i) / mean(b_1) - (a_0i - r_0 b_0i) / mean(b_0)        delta method
    with numerators a, denominators b, r = sum(a) / sum(b). They sum to 0, and the variance of the
    difference is var(psi) / P.
    """
    value_S1 = pooled(numerator_SP, denominator_SP)[..., None]
    residual_SP = numerator_SP - value_S1 * denominator_SP
    scaled_SP = residual_SP / denominator_SP.mean(-1, keepdims=True)
    return scaled_SP[..., 1, :] - scaled_SP[..., 0, :]


def _signs(size: int) -> np.ndarray:
    """[P, R] of +-1, -1 where the runs are swapped: every pattern, or random ones."""
    if size <= EXACT_PROMPTS:
        bits_PR = np.arange(2**size) >> np.arange(size)[:, None] & 1
    else:
        rng = np.random.default_rng(0)
        bits_PR = rng.integers(0, 2, size=(size, NUM_PERMUTATIONS), dtype=np.int8)
    return 1.0 - 2.0 * bits_PR


def permutation_p_value(numerator_SP: np.ndarray, denominator_SP: np.ndarray) -> np.ndarray:
    """Two-sided p-value [...] of "which of the two runs it was makes no difference to a prompt".

    Share of the patterns of swaps whose pooled values differ at least as much as measured. All
    patterns up to ``EXACT_PROMPTS`` prompts; beyond, (1 + hits) / (1 + R) of R random ones, which
    keeps the level (Phipson and Smyth 2010, arXiv:1603.05766).
    """
    sign_PR = _signs(numerator_SP.shape[-1])

    def totals(values_SP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums over prompts of the first and the second label, for every pattern: [..., R]."""
        half_P = (values_SP[..., 0, :] - values_SP[..., 1, :]) / 2
        middle_1 = values_SP.sum((-2, -1))[..., None] / 2
        return middle_1 + half_P @ sign_PR, middle_1 - half_P @ sign_PR

    (first_R, second_R), (per_first_R, per_second_R) = totals(numerator_SP), totals(denominator_SP)
    value_S = pooled(numerator_SP, denominator_SP)
    measured = np.abs(value_S[..., 1] - value_S[..., 0])
    # Patterns that tie with the measured one, itself among them, differ from it by rounding.
    threshold_1 = (measured - 1e-12 * np.abs(value_S).sum(-1))[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        hits_R = np.abs(second_R / per_second_R - first_R / per_first_R) >= threshold_1
    if numerator_SP.shape[-1] <= EXACT_PROMPTS:
        p_value = hits_R.mean(-1)
    else:
        p_value = (1 + hits_R.sum(-1)) / (1 + NUM_PERMUTATIONS)
    return np.where(np.isnan(measured), np.nan, p_value)


def prompts_needed(deviation: float, difference: float, *, power: float = POWER) -> int | None:
    """Prompts with which a paired test at 5 %, two-sided, sees ``difference`` with ``power``.

    P = ((z_0.975 + z_power) deviation / difference)^2 + z_0.975^2 / 2    Guenther 1981
    The second term is for a spread that is itself estimated. With outputs of very different lengths
    (log-normal, sigma 1) and fewer than 60 prompts it asks for more than needed: a power of 90 %
    where 80 % was meant.

    Args:
        deviation: standard deviation of ``influence`` over prompts.
        difference: of the pooled values.

    Returns:
        None where no number is enough, or the prompts show no spread to judge by.
    """
    if not (math.isfinite(deviation) and math.isfinite(difference) and deviation and difference):
        return None
    level, reached = NORMAL.inv_cdf(LEVEL), NORMAL.inv_cdf(power)
    size = ((level + reached) * deviation / difference) ** 2 + level**2 / 2
    return max(math.ceil(size), 2)


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """One ratio of sums in two runs, on the prompts that both have."""

    num_prompts: int
    baseline: float
    compared: float
    difference: float
    """compared - baseline."""
    difference_ci95: tuple[float, float]
    ratio: float
    """compared / baseline."""
    ratio_ci95: tuple[float, float]
    p_value: float
    prompts_for_measured: int | None
    """Prompts with which this difference, if it is the true one, is seen with 80 % power."""
    prompts_for_relative: tuple[int | None, ...]
    """The same for ``RELATIVE_DIFFERENCES``, if they come with the spread measured here."""


def compare_paired(numerator_SP: np.ndarray, denominator_SP: np.ndarray) -> PairedComparison:
    """Everything that is said about one quantity of two runs.

    Args:
        numerator_SP: [2, P], one column per prompt.
        denominator_SP: same shape; 0 in both runs where a prompt ended before the first step: it
            says nothing, and is left out.
    """
    counted_P = denominator_SP.any(0)
    numerator_SP = numerator_SP[:, counted_P].astype(np.float64)
    denominator_SP = denominator_SP[:, counted_P].astype(np.float64)
    size = numerator_SP.shape[-1]
    if not size or not denominator_SP.any(1).all():
        raise ValueError("denominator_SP: a run counted nothing; compare prompts that were decoded")
    baseline, compared = pooled(numerator_SP, denominator_SP).tolist()
    difference_ci95, ratio_ci95 = paired_intervals(numerator_SP, denominator_SP)
    psi_P = influence(numerator_SP, denominator_SP)
    deviation = float(psi_P.std(ddof=1)) if size > 1 else math.nan
    return PairedComparison(
        num_prompts=size,
        baseline=baseline,
        compared=compared,
        difference=compared - baseline,
        difference_ci95=(float(difference_ci95[0]), float(difference_ci95[1])),
        ratio=compared / baseline if baseline else math.nan,
        ratio_ci95=(float(ratio_ci95[0]), float(ratio_ci95[1])),
        p_value=float(permutation_p_value(numerator_SP, denominator_SP)),
        prompts_for_measured=prompts_needed(deviation, compared - baseline),
        prompts_for_relative=tuple(
            prompts_needed(deviation, share * baseline) for share in RELATIVE_DIFFERENCES
        ),
    )


@dataclass(frozen=True, kw_only=True)
class VarianceParts:
    """Where the variance of a prompt's measured value comes from."""

    num_prompts: int
    num_repeats: int
    mean: float
    between_prompts: float
    """Variance of the prompts' true values."""
    between_repeats: float
    """Variance of what all prompts of a repeat share: the machine was slower then."""
    residual: float
    """Variance of what is left: noise of the machine from one prompt to the next."""

    @property
    def repeat_share(self) -> float:
        """The machine's part of the variance of a single measurement; NaN where there is none."""
        machine = self.between_repeats + self.residual
        total = self.between_prompts + machine
        return machine / total if total else math.nan


def variance_parts(value_MP: np.ndarray) -> VarianceParts:
    """Two-way random effects, prompts crossed with repeats, by the method of moments.

    residual = MSE, repeats = max((MSR - MSE) / P, 0), prompts = max((MSP - MSE) / M, 0), with the
    mean squares of the analysis of variance without replication (Searle, Casella and McCulloch
    1992, Variance Components, chapter 4).

    Args:
        value_MP: row m: the m-th repeat, at least 2; column p: prompt p, at least 2.
    """
    num_repeats, num_prompts = value_MP.shape
    assert num_repeats > 1 and num_prompts > 1, value_MP.shape
    mean_P, mean_M1 = value_MP.mean(0), value_MP.mean(1, keepdims=True)
    left_MP = value_MP - mean_P - mean_M1 + value_MP.mean()
    residual = (left_MP**2).sum() / ((num_prompts - 1) * (num_repeats - 1))
    prompts = num_repeats * mean_P.var(ddof=1)
    repeats = num_prompts * mean_M1.var(ddof=1)
    return VarianceParts(
        num_prompts=num_prompts,
        num_repeats=num_repeats,
        mean=float(mean_P.mean()),
        between_prompts=max(float(prompts - residual) / num_repeats, 0.0),
        between_repeats=max(float(repeats - residual) / num_prompts, 0.0),
        residual=float(residual),
    )
