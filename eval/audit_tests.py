"""Paired tests between two servers' answers: the law of their tokens, lengths and stop reasons.

Both servers answer the same prompts, equally often. If they sample from the same distribution, an
answer could as well be the other server's. So a statistic is compared with its values after answers
of the same prompt have changed sides at random. That holds for every statistic, and small samples.
"""

# P prompts, N answers of one server to a prompt, K things that are counted, R permutations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

NUM_PERMUTATIONS = 2000
NUM_SIMULATIONS = 100
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Shares of wrong answers for which the power is computed."""
POWER = 0.9

Features = Sequence[Hashable]
"""What an answer counts as: its first token, its pairs of tokens, ..."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """One test of all prompts."""

    name: str
    p_value: float
    critical: float
    """Largest value of the statistic that counts as equal, at the level of the test."""
    statistic: float
    detectable_share: float | None
    """Smallest share of wrong answers that the test finds with ``POWER``; None: no share."""
    num_answers: int
    """Of each server."""


def counts_of(answers: Sequence[Features]) -> np.ndarray:
    """How often each answer has each feature, [answers, K]; features of one answer are left out."""
    holders = Counter(feature for answer in answers for feature in set(answer))
    columns = {feature: i for i, feature in enumerate(f for f, n in holders.items() if n > 1)}
    counts_NK = np.zeros((len(answers), len(columns)), dtype=np.float32)
    for row, answer in enumerate(answers):
        for feature in answer:
            if feature in columns:
                counts_NK[row, columns[feature]] += 1
    return counts_NK


def homogeneity(ours_RK: np.ndarray, total_K: np.ndarray) -> np.ndarray:
    """Sum of (a - b)^2 / (a + b) over what is counted: 0 where both servers have equal counts."""
    return ((2 * ours_RK - total_K) ** 2 / np.maximum(total_K, 1e-9)).sum(-1)


def compare(
    name: str,
    ours: Sequence[Sequence[Features]],
    theirs: Sequence[Sequence[Features]],
    *,
    level: float,
    rng: np.random.Generator,
) -> PairedTest:
    """Test whether answers of two servers have the same features.

    Args:
        ours: of each prompt, the features of every answer.
        theirs: as many, of the other server.
        level: chance of a false alarm.
    """
    found, drawn_R, tables = 0.0, np.zeros(NUM_PERMUTATIONS), []
    for one, other in zip(ours, theirs, strict=True):
        counts = counts_of([*one, *other])
        labels = np.repeat([1.0, 0.0], [len(one), len(other)]).astype(np.float32)
        total_K = counts.sum(0)
        mixed_RN = rng.permuted(np.tile(labels, (NUM_PERMUTATIONS, 1)), axis=1)
        found += float(homogeneity(labels @ counts, total_K))
        drawn_R += homogeneity(mixed_RN @ counts, total_K)
        tables.append((counts, len(one)))
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
    tables: Sequence[tuple[np.ndarray, int]], critical: float, rng: np.random.Generator
) -> float | None:
    """Smallest share of answers replaced by the prompt's most frequent one that is found."""
    for share in SHARES:
        hits = 0
        for _ in range(NUM_SIMULATIONS):
            value = 0.0
            for counts, size in tables:
                sides = rng.choice(len(counts), (2, size))  # both servers draw from the same law
                usual = counts[(counts @ counts.sum(0)).argmax()]
                wrong_N = rng.random(size) < share
                ours_NK = np.where(wrong_N[:, None], usual, counts[sides[0]])
                ours_K, theirs_K = ours_NK.sum(0), counts[sides[1]].sum(0)
                value += float(homogeneity(ours_K, ours_K + theirs_K))
            hits += value > critical
        if hits >= POWER * NUM_SIMULATIONS:
            return share
    return None


def features_of(kind: str) -> Callable[[Sequence[str], bool], Features]:
    """Reader of an answer's features from its tokens, and whether it ended by itself."""
    return {
        "first tokens": lambda tokens, ended: tokens[:1],
        "following tokens": lambda tokens, ended: list(zip(tokens, tokens[1:], strict=False)),
        "lengths": lambda tokens, ended: [len(tokens).bit_length()],
        "stop reasons": lambda tokens, ended: [ended],
    }[kind]
