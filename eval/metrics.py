"""Compute L', acceptance rates and wall-clock times from decoded turns.

Prompt records store counts and times. Ratios are computed last, from sums over prompts.
Confidence intervals are bootstraps over conversations, except for acceptance rates, which use
``wilson_over_prompts``.
"""

# P conversations, M repeats, E entropy bins, J positions in a round
import math
import os
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET

from ..files import Values
from ..inference.result import DecodeResult, ratio
from .intervals import bootstrap_ratio, wilson_over_prompts
from .record import (
    UNCHECKED,
    AcceptanceLength,
    CategoryRecord,
    EntropyRecord,
    Interval,
    PromptRecord,
    RepeatsRecord,
    RunRecord,
    WallClockRecord,
)

AUTOREGRESSIVE = "autoregressive"
"""The baseline's schedule and method name."""
OVERALL = "overall"
"""Name for the row with all benchmarks pooled."""
ENTROPY_EDGES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0)
"""Entropy bin edges, in nats. Each bin contains its lower edge; the last bin has no upper edge.
The edges are fixed, so you can compare runs bin by bin."""
Turn = TypeVar("Turn", bound=Hashable)


def sum_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    """Add lists element by element. Shorter lists are padded with 0."""
    return _padded(lists).sum(0).astype(int).tolist()


def _padded(counts: Sequence[Sequence[int]], length: int = 0) -> np.ndarray:
    """Return an array with one row per list. Shorter lists are padded with 0."""
    table = np.zeros((len(counts), max([length, *map(len, counts)])))
    for line, row in zip(table, counts, strict=True):
        line[: len(row)] = row
    return table


def pooled_ratio(
    numerator_P: np.ndarray, denominator_P: np.ndarray, *, seed: int = 0
) -> tuple[float, Interval]:
    """Return the ratio of sums over conversations, and its bootstrap interval."""
    low, high = bootstrap_ratio(numerator_P, denominator_P, seed=seed).tolist()
    return ratio(float(numerator_P.sum()), float(denominator_P.sum())), (low, high)


def measure_times(
    results: Sequence[DecodeResult], plain_tokens_per_s: float = math.nan
) -> WallClockRecord | None:
    """Return the measured times, or None if no request recorded two token times.

    tokens/s excludes the prefill: it divides the token count after the first token by the time
    from the first token to the last, both summed over requests. Inter-token times are pooled over
    requests. They are 0 between tokens accepted together.
    """
    times = [np.asarray(r.token_times_s) for r in results if len(r.token_times_s) > 1]
    if not times:
        return None
    gaps = np.concatenate([np.diff(t) for t in times])
    tokens_per_s = ratio(len(gaps), float(gaps.sum()))
    first = [r.token_times_s[0] for r in results if r.token_times_s]
    loads = [r.load_average for r in results if r.load_average is not None]
    return WallClockRecord(
        tokens_per_s=tokens_per_s,
        ttft_ms=float(np.median(first)) * 1e3,
        itl_ms_p50=float(np.quantile(gaps, 0.5)) * 1e3,
        itl_ms_p99=float(np.quantile(gaps, 0.99)) * 1e3,
        speedup=ratio(tokens_per_s, plain_tokens_per_s),
        load_average=float(np.median(loads)) if loads else None,
        cores=os.cpu_count() if loads else None,
    )


def run_record(
    results: Sequence[DecodeResult],
    *,
    conversations: Sequence[Hashable] | None = None,
    seed: int = 0,
    **fields: Any,
) -> RunRecord:
    """Return one entry for results.json. Missing values are NaN; the file stores them as null.

    Args:
        results: one per turn, all with the same number of stages.
        conversations: each result's conversation. By default every result is a conversation.
        fields: other record fields, for example the settings.
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
    rounds = [length for result in results for length in result.round_lengths]
    tests = sum_lists([result.position_tests for result in results])
    accepts = sum_lists([result.position_accepts for result in results])
    # Nothing may have been accepted at the last positions.
    accepts += [0] * (len(tests) - len(accepts))
    known = {
        "stages": num_stages,
        "tree": None,
        "prompts": len(counts),
        "tokens": sum(tokens for tokens, _ in counts.values()),
        "steps": sum(steps for _, steps in counts.values()),
        "equivalent_acceptance_length": acceptance_length(list(counts.values()), num_stages, seed),
        "mean_acceptance_length": ratio(sum(rounds), len(rounds)),
        "draft_acceptance_rate": ratio(sum(accepts), sum(tests)),
        "theoretical_speedup": ratio(
            sum(result.virtual_time_autoregressive for result in results),
            sum(result.virtual_time for result in results),
        ),
        "wallclock": measure_times(results),
        "lossless": UNCHECKED,
        "turns": len(results),
        "rounds": len(rounds),
        "acceptance_histogram": np.bincount(rounds).tolist() if rounds else [],
        "acceptance_by_position": [ratio(a, t) for a, t in zip(accepts, tests, strict=True)],
        "position_tests": tests,
        "position_accepts": accepts,
        "drafted": sum(result.num_drafted for result in results),
        "draft_forwards": sum(result.num_draft_forwards for result in results),
        "seed": seed,
    }
    return RunRecord(**(known | fields))


def acceptance_length(
    counts: Sequence[tuple[int, int]], num_stages: int, seed: int = 0
) -> AcceptanceLength:
    """Return L' = n sum(N) / sum(K), with N tokens and K steps per conversation.

    Conversations without steps are left out: they ended with the prefill's token.
    """
    decoded = [(num_stages * tokens, steps) for tokens, steps in counts if steps]
    numerator_P, denominator_P = np.array(decoded, dtype=np.float64).reshape(-1, 2).T
    pooled, ci95 = pooled_ratio(numerator_P, denominator_P, seed=seed)
    mean = float((numerator_P / denominator_P).mean()) if decoded else math.nan
    return AcceptanceLength(pooled=pooled, mean=mean, ci95=ci95)


# -- acceptance by category, position and entropy --------------------------------------------------


def acceptance_by_category(
    rows: Sequence[PromptRecord], *, num_stages: int, seed: int = 0
) -> dict[str, CategoryRecord]:
    """Return acceptance rates and L' by category.

    With several benchmarks, the keys are "benchmark/category".
    """
    several = len({row.benchmark for row in rows}) > 1
    groups: dict[str, list[PromptRecord]] = {}
    for row in rows:
        name = f"{row.benchmark}/{row.category}" if several else row.category
        groups.setdefault(name, []).append(row)
    return {
        name: CategoryRecord(
            prompts=len(group),
            **rate_fields(
                np.array([sum(row.position_accepts) for row in group]),
                np.array([sum(row.position_tests) for row in group]),
            ),
            equivalent_acceptance_length=acceptance_length(
                [(row.tokens, row.steps) for row in group], num_stages, seed
            ),
        )
        for name, group in groups.items()
    }


def rate_fields(accepts_P: np.ndarray, tests_P: np.ndarray) -> Values:
    """Return the counts, the acceptance rate and its interval as record fields."""
    accepts, tests = int(accepts_P.sum()), int(tests_P.sum())
    return {
        "tests": tests,
        "accepts": accepts,
        "draft_acceptance_rate": ratio(accepts, tests),
        "draft_acceptance_rate_ci95": wilson_over_prompts(accepts_P, tests_P),
    }


def acceptance_intervals_by_position(rows: Sequence[PromptRecord]) -> list[Interval]:
    """Return a confidence interval for each value in "acceptance_by_position"."""
    tests_PJ = _padded([row.position_tests for row in rows])
    accepts_PJ = _padded([row.position_accepts for row in rows], tests_PJ.shape[1])
    return [wilson_over_prompts(a, t) for a, t in zip(accepts_PJ.T, tests_PJ.T, strict=True)]


def token_tests(result: DecodeResult) -> Iterator[tuple[int, bool]]:
    """Yield an index into ``token_ids``, and True if accepted, for each tested draft token.

    All tokens in a round are accepted draft tokens, except possibly the last one. After a
    rejection, the last token replaces the rejected draft token. If the round's end is "u", no
    draft token was tested in its place.
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
    """Count tested and accepted draft tokens in bins of the target's entropy at their position."""
    tests, accepts = [0] * len(ENTROPY_EDGES), [0] * len(ENTROPY_EDGES)
    for index, accepted in token_tests(result):
        # If a token is certain, rounding can make its entropy slightly negative.
        place = max(bisect_right(ENTROPY_EDGES, entropies[index]) - 1, 0)
        tests[place] += 1
        accepts[place] += accepted
    return tests, accepts


def acceptance_by_entropy(rows: Sequence[PromptRecord]) -> list[EntropyRecord]:
    """Return one record per entropy bin, or an empty list if no entropies were recorded."""
    tests_PE = _padded([row.entropy_tests for row in rows if row.entropy_tests is not UNSET])
    accepts_PE = _padded([row.entropy_accepts for row in rows if row.entropy_accepts is not UNSET])
    edges = zip(ENTROPY_EDGES, [*ENTROPY_EDGES[1:], math.inf], strict=True)
    return [
        EntropyRecord(entropy_from=low, entropy_to=high, **rate_fields(accepts_P, tests_P))
        for (low, high), tests_P, accepts_P in zip(edges, tests_PE.T, accepts_PE.T, strict=False)
    ]


# -- repeats: the same random numbers give the same tokens, only the times differ ------------------


def decode_seconds(result: DecodeResult) -> float:
    """Return the seconds from the first token to the last, the time used for tokens/s."""
    times_s = result.token_times_s
    return times_s[-1] - times_s[0] if times_s else 0.0


def repeats_record(
    rows: Sequence[PromptRecord], repeats: Sequence[Mapping[Turn, DecodeResult]]
) -> RepeatsRecord:
    """Return the record for M repeats. ``repeats`` contains the results of each repeat, by turn."""
    outcomes = [
        {key: (result.token_ids, result.num_steps) for key, result in turns.items()}
        for turns in repeats
    ]
    keys = dict.fromkeys(key for turns in repeats for key in turns)
    tokens = sum(row.tokens for row in rows)
    seconds_M = np.array([row.decode_s_repeats for row in rows], dtype=np.float64).sum(0).tolist()
    return RepeatsRecord(
        repeats=len(repeats),
        unequal_turns=sum(any(own.get(k) != outcomes[0].get(k) for own in outcomes) for k in keys),
        tokens_per_s=[ratio(tokens, seconds) for seconds in seconds_M],
    )
