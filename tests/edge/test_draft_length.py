"""Draft-length policies: costs against enumeration, estimators, known distributions, rates."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from pipedraft.inference.edge.channel import PRESETS, LinkState
from pipedraft.inference.edge.draft_length import (
    Alg2,
    Eq11,
    Fixed,
    Geometric,
    RoundCost,
    RoundShape,
    parse_policy,
)

# K draft lengths 1..MAX_LENGTH, or positions of a draft token in its round
MAX_LENGTH = 8
LINK = LinkState(up_bytes_per_s=2e4, down_bytes_per_s=1e5, round_trip_s=0.05)
SHAPE = RoundShape(
    draft_s=0.02,
    verify_s=0.08,
    verify_row_s=0.001,
    up_bytes=70,
    up_bytes_per_token=8,
    down_bytes=75,
    reject_bytes=4000,
)
POSITION_K = np.arange(1, MAX_LENGTH + 1)
FALLING_K = np.array([0.92, 0.86, 0.80, 0.72, 0.62, 0.5, 0.4, 0.3])
FIXED_S = 0.05 + 70 / 2e4 + 0.08 + 75 / 1e5
MARGINAL_S = 0.02 + 8 / 2e4 + 0.001
REJECT_S = 4000 / 1e5


def linear_cost(fixed_s: float, marginal_s: float, max_length: int = MAX_LENGTH) -> RoundCost:
    """T_step = T_fixed + K T_marg, whatever the verification result."""
    seconds_K = fixed_s + marginal_s * np.arange(1, max_length + 1)
    return RoundCost(seconds_K, seconds_K)


def outcomes(survival_K: np.ndarray, length: int) -> list[tuple[int, float]]:
    """Accepted tokens in a round, and their probabilities."""
    at_least = [1.0, *survival_K[:length].tolist(), 0.0]
    return [(m, at_least[m] - at_least[m + 1]) for m in range(length + 1)]


def brute_force(
    survival_K: np.ndarray, seconds: Callable[[int, int], float], has_bonus: bool
) -> int:
    """Length with the highest rate, by enumerating each length's outcomes."""
    rates = []
    for length in range(1, len(survival_K) + 1):
        distribution = outcomes(survival_K, length)
        tokens = sum(p * (m + (1 if m < length or has_bonus else 0)) for m, p in distribution)
        rates.append(tokens / sum(p * seconds(length, m) for m, p in distribution))
    return int(np.argmax(rates)) + 1


def test_a_waiting_round_costs_eq_10_and_its_rejection() -> None:
    cost = RoundCost.stop_and_wait(SHAPE, LINK, MAX_LENGTH)
    number_K = POSITION_K
    assert cost.hit_s_K == pytest.approx(FIXED_S + number_K * MARGINAL_S)
    assert cost.miss_s_K == pytest.approx(cost.hit_s_K + REJECT_S)
    survival_K = 0.7**number_K
    tokens = [(1 - 0.7 ** (length + 1)) / (1 - 0.7) for length in range(1, MAX_LENGTH + 1)]
    assert cost.expected_tokens(survival_K) == pytest.approx(tokens)


def test_a_round_beside_the_next_ones_drafting_is_picospecs_closed_form() -> None:
    shape = replace(SHAPE, verify_row_s=0, up_bytes_per_token=0, reject_bytes=0)
    cost = RoundCost.asynchronous(shape, LINK, 16)
    a, g = 0.8, np.arange(1, 17)
    drafting, away = 0.02 * g, FIXED_S
    assert drafting[0] < away < drafting[-1], "both sides of the maximum"
    expected = a**g * np.maximum(drafting, away) + (1 - a**g) * (drafting + away)
    assert cost.expected_s(a**g) == pytest.approx(expected)
    assert cost.expected_tokens(a**g) == pytest.approx((1 - a**g) / (1 - a))


@pytest.mark.parametrize(
    ("token_bytes", "lengths"),
    [(4, {"5g": 6, "4g": 6, "wifi": 7}), (50_004, {"5g": 5, "4g": 5, "wifi": 3})],
)
def test_a_weak_link_shortens_drafts_only_where_tokens_are_large(token_bytes, lengths) -> None:
    """FlexSpec's figures 2 and 5: drafts shorten with 50 kB a token, not with ids."""
    shape = RoundShape(
        draft_s=0.0085,
        verify_s=0.166,
        up_bytes=74,
        up_bytes_per_token=token_bytes,
        down_bytes=74,
    )
    survival_K = 0.7**POSITION_K
    for name, length in lengths.items():
        cost = RoundCost.stop_and_wait(shape, PRESETS[name].state(0.0), MAX_LENGTH)
        assert cost.best_length(survival_K) == length, name


def test_the_best_length_is_that_of_the_enumerated_outcomes() -> None:
    random = np.random.default_rng(0)
    chosen = {True: set(), False: set()}
    for _ in range(200):
        survival_K = np.cumprod(random.uniform(0.2, 1.0, MAX_LENGTH))
        draft_s, away_s = random.uniform(0.002, 0.1), random.uniform(0.02, 0.4)
        shape = RoundShape(
            draft_s=draft_s,
            verify_s=away_s,
            up_bytes=0,
            up_bytes_per_token=0,
            down_bytes=0,
            reject_bytes=50,
        )
        link = LinkState(up_bytes_per_s=1.0, down_bytes_per_s=1000.0, round_trip_s=0.0)

        def waiting(k: int, m: int, draft_s=draft_s, away_s=away_s) -> float:
            return k * draft_s + away_s + (0.05 if m < k else 0)

        def overlapping(k: int, m: int, draft_s=draft_s, away_s=away_s) -> float:
            return max(k * draft_s, away_s) if m == k else k * draft_s + away_s + 0.05

        for make, seconds, bonus in (
            (RoundCost.stop_and_wait, waiting, True),
            (RoundCost.asynchronous, overlapping, False),
        ):
            cost = make(shape, link, MAX_LENGTH)
            best = brute_force(survival_K, seconds, bonus)
            assert cost.best_length(survival_K) == best
            chosen[bonus].add(best)
    assert len(chosen[True]) == MAX_LENGTH and len(chosen[False]) >= 4


ROUNDS = [(4, 4), (4, 1), (3, 0), (2, 2), (1, 0), (4, 3), (4, 4), (1, 1), (3, 2)]
"""Drafted and accepted tokens; at most 4."""


def faded(values: list[int], keep: Fraction) -> Fraction:
    return sum((v * keep ** (len(values) - 1 - i) for i, v in enumerate(values)), Fraction())


def test_the_published_average_and_the_censored_rate_are_their_sums() -> None:
    published, rate = Alg2(4), Geometric(4, memory=8, acceptance=0.75, weight=3)
    for drafted, accepted in ROUNDS:
        published.observe(drafted, accepted)
        rate.observe(drafted, accepted)
    keep, count = Fraction(9, 10), len(ROUNDS)
    ratios = [Fraction(accepted, drafted) for drafted, accepted in ROUNDS]
    average = Fraction(8, 10) * keep**count + sum(
        ratio * (1 - keep) * keep ** (count - 1 - i) for i, ratio in enumerate(ratios)
    )
    assert published.acceptance == pytest.approx(float(average), rel=1e-12)
    keep = Fraction(7, 8)
    accepted = faded([m for _, m in ROUNDS], keep)
    tested = faded([m + (m < k) for k, m in ROUNDS], keep)
    expected = (accepted + 3 * Fraction(3, 4)) / (tested + 3)
    assert rate.acceptance == pytest.approx(float(expected), rel=1e-12)


def test_eq_11_as_published_always_takes_the_longest() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        policy = Eq11(MAX_LENGTH)
        policy.acceptance = random.uniform(0.01, 1)
        cost = linear_cost(random.uniform(0.001, 1), random.uniform(0.001, 1))
        assert policy.choose(cost) == MAX_LENGTH


def test_algorithm_2_as_published_takes_an_end_where_the_best_is_between() -> None:
    random = np.random.default_rng(6)
    chosen, differs = set(), 0
    for _ in range(300):
        policy = Alg2(MAX_LENGTH)
        policy.acceptance = rate = random.uniform(0.05, 0.99)
        fixed_s, marginal_s = random.uniform(0.01, 1), random.uniform(0.01, 0.3)
        length = policy.choose(linear_cost(fixed_s, marginal_s))
        assert length == (MAX_LENGTH if rate * fixed_s > marginal_s else 1)
        survival_K = rate**POSITION_K
        best = brute_force(survival_K, lambda k, _, f=fixed_s, m=marginal_s: f + m * k, True)
        chosen.add(length)
        differs += length != best
    assert chosen == {1, MAX_LENGTH}
    assert differs > 100


def test_policies_are_parsed() -> None:
    assert isinstance(parse_policy("geometric"), Geometric)
    policy = parse_policy("fixed:3")
    assert isinstance(policy, Fixed)
    assert policy.choose(linear_cost(1, 1)) == 3
    for text in ("fixed", "fixed:0", "fixed:9", "fixed:x", "oracle", "geometric:3", "survival", ""):
        with pytest.raises(ValueError, match=r"^policy: '.*' is unknown; give|below 1"):
            parse_policy(text)
    with pytest.raises(ValueError, match="draft_length.max_length: 0 is below 1"):
        Geometric(0)
