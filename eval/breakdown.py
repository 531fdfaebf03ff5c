"""Acceptance by category, position and entropy, with intervals over prompts, from their counts."""

# P prompts
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import UNSET

from pipedraft.eval.metrics import (
    CONFIDENCE,
    bootstrap_ratio,
    effective_size,
    ratio,
    student_quantile,
)
from pipedraft.eval.record import (
    AcceptanceLength,
    CategoryRecord,
    EntropyRecord,
    Interval,
    PromptRecord,
)
from pipedraft.inference.result import DecodeResult

ENTROPY_EDGES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0)
"""Nats. Each bin reaches from one to below the next, the last one to infinity; fixed, so that runs
can be compared bin by bin."""


def wilson_over_prompts(accepts_P: np.ndarray, tests_P: np.ndarray) -> tuple[float, float]:
    """95 % interval of sum(accepts) / sum(tests) where the tests of a prompt are dependent.

    Wilson's interval with the effective number of tests p (1 - p) / v, where v is the jackknife's
    variance of the rate over prompts, and Student's t in place of z (after Korn and Graubard 1998,
    Survey Methodology 24). Where v is 0, that is where all or none were accepted, every prompt
    counts as one test.
    Deviation: theirs widens Clopper and Pearson's interval, which is wider than 95 % asks for;
    their variance is linearised, and their degrees of freedom take prompts for equally long.

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
    t = student_quantile((1 + CONFIDENCE) / 2, max(alike - 1, 1.0))
    shrink = 1 + t**2 / effective
    centre = (rate + t**2 / (2 * effective)) / shrink
    spread = rate * (1 - rate) / effective + t**2 / (4 * effective**2)
    half = t / shrink * math.sqrt(spread)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def acceptance_by_category(
    rows: Sequence[PromptRecord], *, num_stages: int, seed: int = 0
) -> dict[str, CategoryRecord]:
    """Rates and L' of each category of prompt; "benchmark/category" where several are pooled.

    Args:
        seed: of the bootstrap of L'.
    """
    several = len({row.benchmark for row in rows}) > 1
    groups: dict[str, list[PromptRecord]] = {}
    for row in rows:
        name = f"{row.benchmark}/{row.category}" if several else row.category
        groups.setdefault(name, []).append(row)
    return {name: _describe(group, num_stages, seed) for name, group in groups.items()}


def _describe(rows: Sequence[PromptRecord], num_stages: int, seed: int) -> CategoryRecord:
    tests_P = np.array([sum(row.position_tests) for row in rows])
    accepts_P = np.array([sum(row.position_accepts) for row in rows])
    decoded = [(num_stages * row.tokens, row.steps) for row in rows if row.steps]
    numerator_P, denominator_P = np.array(decoded, dtype=np.float64).reshape(-1, 2).T
    return CategoryRecord(
        prompts=len(rows),
        tests=int(tests_P.sum()),
        accepts=int(accepts_P.sum()),
        draft_acceptance_rate=ratio(int(accepts_P.sum()), int(tests_P.sum())),
        draft_acceptance_rate_ci95=wilson_over_prompts(accepts_P, tests_P),
        equivalent_acceptance_length=AcceptanceLength(
            pooled=ratio(float(numerator_P.sum()), float(denominator_P.sum())),
            ci95=tuple(bootstrap_ratio(numerator_P, denominator_P, seed=seed).tolist()),
        ),
    )


def _table(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Counts of each prompt, shorter lists filled up with 0."""
    table = np.zeros((len(counts), max(map(len, counts), default=0)))
    for line, row in zip(table, counts, strict=True):
        line[: len(row)] = row
    return table


def acceptance_intervals_by_position(rows: Sequence[PromptRecord]) -> list[Interval]:
    """Entry j: interval of "acceptance_by_position"[j]."""
    tests_PJ = _table([row.position_tests for row in rows])
    accepts_PJ = np.zeros_like(tests_PJ)
    found_PJ = _table([row.position_accepts for row in rows])
    accepts_PJ[:, : found_PJ.shape[1]] = found_PJ
    pairs = zip(accepts_PJ.T, tests_PJ.T, strict=True)
    return [wilson_over_prompts(accepts_P, tests_P) for accepts_P, tests_P in pairs]


def guessed_tokens(result: DecodeResult) -> Iterator[tuple[int, bool]]:
    """Index in ``token_ids`` of every token that was tested against a guess, and the outcome.

    Every token of a round but the last was a guess that was right: the round went on with it.
    """
    index = 1  # after the token from the prefill
    for length, end in zip(result.round_lengths, result.round_ends, strict=True):
        yield from ((index + place, True) for place in range(length - 1))
        index += length
        if end != "u":
            yield index - 1, end == "a"


def count_by_entropy(
    result: DecodeResult, entropies: Sequence[float]
) -> tuple[list[int], list[int]]:
    """Tests and accepted tests in each bin.

    Args:
        entropies: of the target's distribution of each of the ``token_ids``.
    """
    tests, accepts = [0] * len(ENTROPY_EDGES), [0] * len(ENTROPY_EDGES)
    for index, accepted in guessed_tokens(result):
        # Rounding leaves a certain token an entropy just below 0.
        place = max(bisect_right(ENTROPY_EDGES, entropies[index]) - 1, 0)
        tests[place] += 1
        accepts[place] += accepted
    return tests, accepts


def acceptance_by_entropy(rows: Sequence[PromptRecord]) -> list[EntropyRecord]:
    """One entry for each bin, empty ones included; none where no entropies were counted."""
    tests_PE = _table([row.entropy_tests for row in rows if row.entropy_tests is not UNSET])
    accepts_PE = _table([row.entropy_accepts for row in rows if row.entropy_accepts is not UNSET])
    edges = zip(ENTROPY_EDGES, [*ENTROPY_EDGES[1:], math.inf], strict=True)
    return [
        EntropyRecord(
            entropy_from=low,
            entropy_to=high,
            tests=int(tests_P.sum()),
            accepts=int(accepts_P.sum()),
            draft_acceptance_rate=ratio(int(accepts_P.sum()), int(tests_P.sum())),
            draft_acceptance_rate_ci95=wilson_over_prompts(accepts_P, tests_P),
        )
        for (low, high), tests_P, accepts_P in zip(edges, tests_PE.T, accepts_PE.T, strict=False)
    ]
