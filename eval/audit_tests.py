"""Compare two servers' answers by permutation tests on tokens, lengths and stop reasons.

Both servers answer the same prompts equally often. If they sample from the same distribution, any
answer could as well come from the other server. So compare a statistic with its values after
randomly swapping answers to the same prompt. The test is valid for every statistic, and for small
samples.
"""

# P prompts, N answers per server and prompt, K counted features, R permutations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

NUM_PERMUTATIONS = 2000
NUM_SIMULATIONS = 100
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Wrong-answer shares for the power computation."""
POWER = 0.9
"""A test must find a fault with this probability."""

Features = Sequence[Hashable]
"""An answer's features: its first token, its token pairs, ..."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """One test's result on all prompts."""

    name: str
    p_value: float
    critical: float
    """Critical value: if both servers are equal, a larger statistic has probability ``level``."""
    statistic: float
    detectable_share: float | None
    """Smallest share of wrong answers found with probability ``POWER``; None: none is found."""
    num_answers: int


def counts_of(answers: Sequence[Features]) -> np.ndarray:
    """Return feature counts [answers, K]. Drop features that occur in only one answer."""
    holders = Counter(feature for answer in answers for feature in set(answer))
    columns = {feature: i for i, feature in enumerate(f for f, n in holders.items() if n > 1)}
    counts_NK = np.zeros((len(answers), len(columns)), dtype=np.float32)
    for row, answer in enumerate(answers):
        for feature in answer:
            if feature in columns:
                counts_NK[row, columns[feature]] += 1
    return counts_NK


def homogeneity(ours_RK: np.ndarray, total_K: np.ndarray) -> np.ndarray:
    """Return the sum over features of (ours - theirs)^2 / total, where theirs is total - ours.

    The sum is 0 if both servers have equal counts.
    """
    return ((2 * ours_RK - total_K) ** 2 / np.maximum(total_K, 1e-9)).sum(-1)


def compare(
    name: str,
    ours: Sequence[Sequence[Features]],
    theirs: Sequence[Sequence[Features]],
    *,
    level: float,
    rng: np.random.Generator,
    wrong: Features | None = None,
) -> PairedTest:
    """Test two servers for equal feature distributions.

    Args:
        ours: one server's features, by prompt and answer.
        theirs: the other server's features. The power assumes as many answers as in ``ours``.
        level: false-alarm probability.
        wrong: a faulty answer's features, to simulate the power. None uses, for each prompt, the
            answer with the most frequent features.
    """
    found, drawn_R, tables = 0.0, np.zeros(NUM_PERMUTATIONS), []
    for one, other in zip(ours, theirs, strict=True):
        counts = counts_of([*one, *other, *([wrong, wrong] if wrong else [])])
        counts, faulty_K = counts[: len(one) + len(other)], counts[-1]
        if wrong is None:
            faulty_K = counts[(counts @ counts.sum(0)).argmax()]
        labels = np.repeat([1.0, 0.0], [len(one), len(other)]).astype(np.float32)
        total_K = counts.sum(0)
        mixed_RN = rng.permuted(np.tile(labels, (NUM_PERMUTATIONS, 1)), axis=1)
        found += float(homogeneity(labels @ counts, total_K))
        drawn_R += homogeneity(mixed_RN @ counts, total_K)
        tables.append((counts, faulty_K, len(one)))
    critical = float(np.quantile(drawn_R, 1 - level))
    p_value = (1 + int((drawn_R >= found - 1e-6).sum())) / (1 + NUM_PERMUTATIONS)
    return PairedTest(
        name=name,
        p_value=p_value,
        critical=critical,
        statistic=found,
        detectable_share=_detectable(tables, critical, rng),
        num_answers=sum(map(len, ours)),
    )


def _detectable(
    tables: Sequence[tuple[np.ndarray, np.ndarray, int]], critical: float, rng: np.random.Generator
) -> float | None:
    """Return the smallest of SHARES of wrong answers that simulated tests detect, or None.

    Args:
        tables: for each prompt, feature counts [2 N, K] of both servers' answers, a faulty answer's
            feature counts [K], and the answer count per server.
        critical: critical value. A larger statistic raises an alarm.
    """
    for share in SHARES:
        hits = 0
        for _ in range(NUM_SIMULATIONS):
            value = 0.0
            for counts, faulty_K, size in tables:
                sides = rng.choice(len(counts), (2, size))  # one distribution for both
                wrong_N = rng.random(size) < share
                ours_NK = np.where(wrong_N[:, None], faulty_K, counts[sides[0]])
                ours_K, theirs_K = ours_NK.sum(0), counts[sides[1]].sum(0)
                value += float(homogeneity(ours_K, ours_K + theirs_K))
            hits += value > critical
        if hits >= POWER * NUM_SIMULATIONS:
            return share
    return None


FEATURES: dict[str, Callable[[Sequence[str], bool], Features]] = {
    "first tokens": lambda tokens, ended: tokens[:1],
    "following tokens": lambda tokens, ended: list(zip(tokens, tokens[1:], strict=False)),
    "lengths": lambda tokens, ended: [len(tokens).bit_length()],
    "stop reasons": lambda tokens, ended: [ended],
}
"""Test name -> function that makes features from an answer's tokens and its ``ended``."""
OF_THE_END = ("lengths", "stop reasons")
"""Tests whose power assumes wrong answers without an end. In the other tests a wrong answer is
the prompt's answer with the most frequent features."""
