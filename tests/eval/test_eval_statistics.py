"""Intervals on synthetic data with an exactly known truth.

The drafts emit geometric rounds. Text lengths are heavy-tailed (log-normal, sigma 1), and long
texts are easier.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest
from eval_runs import prompt_record

from pipedraft.eval.intervals import (
    bootstrap_ratio,
    compare_paired,
    paired_interval,
    wilson_over_prompts,
)
from pipedraft.eval.metrics import acceptance_by_category, acceptance_intervals_by_position
from pipedraft.eval.record import AcceptanceLength

# E experiments, S the two runs, P prompts, U turns
STAGES = 4
LENGTHS = np.array(
    [math.floor(math.exp(4 + NormalDist().inv_cdf((i + 0.5) / 4000))) + 1 for i in range(4000)]
)
"""Tokens per text: log-normal quantiles, so that the mean is known."""
KINDS = ((4, 6, 1), (2, 6, 3))
"""For half the prompts each: Beta parameters for the rejection rate, factor on the length."""
BAND = (0.93, 0.97)
"""Coverage band for a 95 % interval; 2000 experiments have a standard error of 0.5 %."""


def draw(seed: int, experiments: int, prompts: int, better: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw n N and K [E, S, P] for two drafts on the same texts.

    A round ends at each token with the prompt's rejection rate, and costs n - 1 steps more. The
    second draft rejects ``better`` times as often on average; the factor varies from prompt to
    prompt. With 1 both drafts reject equally often on each prompt.
    """
    rng = np.random.default_rng(seed)
    size = (experiments, prompts)
    kind = rng.integers(0, 2, size)
    rejected, kept, factor = np.moveaxis(np.array(KINDS)[kind], -1, 0)
    tokens = rng.choice(LENGTHS, size) * factor
    first = rng.beta(rejected, kept)
    second = first if better == 1 else first * rng.beta(9 * better, 9 * (1 - better), size)
    rounds_ESP = 1 + rng.binomial(tokens[:, None] - 1, np.stack([first, second], 1))
    tokens_ESP = np.repeat(tokens[:, None], 2, 1)
    return STAGES * tokens_ESP.astype(float), tokens_ESP + (STAGES - 1.0) * rounds_ESP


def truth(better: float) -> float:
    """n E[N] / E[K]."""
    tokens = [LENGTHS.mean() * factor for _, _, factor in KINDS]
    rates = [better * rejected / (rejected + kept) for rejected, kept, _ in KINDS]
    rounds = [1 + (n - 1) * rate for n, rate in zip(tokens, rates, strict=True)]
    return STAGES * sum(tokens) / (sum(tokens) + (STAGES - 1) * sum(rounds))


def pooled(numerator_SP: np.ndarray, denominator_SP: np.ndarray) -> np.ndarray:
    return numerator_SP.sum(-1) / denominator_SP.sum(-1)


def coverage(interval_E2: np.ndarray, value: float) -> float:
    return float(np.mean((interval_E2[:, 0] <= value) & (value <= interval_E2[:, 1])))


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    return draw(1, 2000, 80, better=0.9)


def test_the_stated_truth_is_that_of_the_data() -> None:
    numerator, denominator = draw(0, 1, 400_000, better=0.9)
    np.testing.assert_allclose(
        pooled(numerator, denominator)[0], [truth(1), truth(0.9)], rtol=0.005
    )


def test_interval_of_the_pooled_length_covers_the_truth(data) -> None:
    numerator, denominator = data
    for side, value in enumerate((truth(1), truth(0.9))):
        interval = bootstrap_ratio(numerator[:, side], denominator[:, side])
        assert BAND[0] <= coverage(interval, value) <= BAND[1]


def test_interval_of_the_paired_ratio_covers_the_truth(data) -> None:
    assert BAND[0] <= coverage(paired_interval(*data), truth(0.9) / truth(1)) <= BAND[1]


# -- all of it ------------------------------------------------------------------------------


def test_a_comparison_of_a_run_with_itself_finds_nothing() -> None:
    numerator, denominator = (x[0] for x in draw(10, 1, 20, better=1))
    same = compare_paired(numerator[[0, 0]], denominator[[0, 0]])
    assert (same.ratio, same.ratio_ci95, same.differs) == (1.0, (1.0, 1.0), False)


def test_prompts_without_a_step_are_left_out_and_a_single_one_has_no_interval() -> None:
    numerator = np.array([[8, 0, 8], [8, 0, 8]])
    denominator = np.array([[4, 0, 8], [2, 0, 4]])
    two = compare_paired(numerator, denominator)
    assert (two.num_prompts, two.baseline, two.compared) == (2, 16 / 12, 16 / 6)
    assert all(map(math.isfinite, two.ratio_ci95))
    one = compare_paired(numerator[:, :2], denominator[:, :2])
    assert (one.num_prompts, one.ratio, one.differs) == (1, 2.0, False)
    assert all(map(math.isnan, one.ratio_ci95))


# -- acceptance by category and position -----------------------------------------------------


def acceptance_data(experiments: int, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(12)
    tests = rng.choice(LENGTHS, (experiments, prompts))
    return rng.binomial(tests, rng.beta(6, 4, (experiments, prompts))), tests


def plain_wilson(accepts_P: np.ndarray, tests_P: np.ndarray) -> tuple[float, float]:
    tests, z = tests_P.sum(), 1.959964
    rate = accepts_P.sum() / tests
    half = z * math.sqrt(rate * (1 - rate) / tests + z**2 / (4 * tests**2))
    center = rate + z**2 / (2 * tests)
    return (center - half) / (1 + z**2 / tests), (center + half) / (1 + z**2 / tests)


def test_acceptance_interval_over_prompts_covers_the_truth_and_wilsons_does_not() -> None:
    accepts, tests = acceptance_data(2000, 80)
    over_prompts = [wilson_over_prompts(a, t) for a, t in zip(accepts, tests, strict=True)]
    assert BAND[0] <= coverage(np.array(over_prompts), 0.6) <= BAND[1]
    plain = [plain_wilson(a, t) for a, t in zip(accepts, tests, strict=True)]
    assert coverage(np.array(plain), 0.6) < 0.6
    accepts, tests = acceptance_data(2000, 10)
    few = [wilson_over_prompts(a, t) for a, t in zip(accepts, tests, strict=True)]
    assert 0.9 <= coverage(np.array(few), 0.6) <= BAND[1]


def test_acceptance_interval_of_independent_tests_is_wilsons() -> None:
    rng = np.random.default_rng(13)
    tests = np.full(2000, 5)
    accepts = rng.binomial(tests, 0.7)
    got, expected = wilson_over_prompts(accepts, tests), plain_wilson(accepts, tests)
    np.testing.assert_allclose(got, expected, atol=0.1 * (expected[1] - expected[0]))


def test_acceptance_interval_does_not_shrink_to_a_point_where_all_was_accepted() -> None:
    tests = np.array([7, 7, 0, 7])
    low, high = wilson_over_prompts(tests, tests)
    # Three prompts, t = 4.303 (the series gives 4.27): 1 / (1 + t^2 / 3).
    assert high == 1.0 and low == pytest.approx(1 / (1 + 4.303**2 / 3), abs=0.003)
    assert wilson_over_prompts(0 * tests, tests)[0] == 0.0
    assert all(map(math.isnan, wilson_over_prompts(tests[:1], tests[:1])))


def make_row(category: str, tests: list[int], accepts: list[int], benchmark: str = "b"):
    return prompt_record(
        benchmark=benchmark, category=category, tokens=12, steps=24,
        position_tests=tests, position_accepts=accepts,
    )  # fmt: skip


def test_categories_and_positions_pool_the_prompts_that_belong_to_them() -> None:
    rows = [
        make_row("writing", [4, 2], [2, 2]),
        make_row("math", [3, 3, 3], [3, 3, 1]),
        make_row("writing", [4], [1]),
    ]
    found = acceptance_by_category(rows, num_stages=4)
    assert list(found) == ["writing", "math"]
    writing = found["writing"]
    assert (writing.prompts, writing.tests, writing.accepts) == (2, 10, 5)
    assert writing.draft_acceptance_rate == 0.5
    low, high = writing.draft_acceptance_rate_ci95
    assert 0 <= low < 0.5 < high <= 1
    length = AcceptanceLength(pooled=2.0, mean=2.0, ci95=(2.0, 2.0))
    assert writing.equivalent_acceptance_length == length
    assert math.isnan(found["math"].draft_acceptance_rate_ci95[0])
    first, second, third = acceptance_intervals_by_position(rows)
    assert first == wilson_over_prompts(np.array([2, 3, 1]), np.array([4, 3, 4]))
    assert second == wilson_over_prompts(np.array([2, 3]), np.array([2, 3]))
    assert all(map(math.isnan, third))
    rows = [make_row("math", [1], [1], "one"), make_row("math", [1], [0], "two")]
    assert list(acceptance_by_category(rows, num_stages=4)) == ["one/math", "two/math"]
