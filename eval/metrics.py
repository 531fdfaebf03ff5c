"""The one definition of every reported number. Counts are pooled; ratios are computed at the end.

The unit of resampling is a conversation: steps inside one are dependent, and so are its turns.
"""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from pipedraft.eval.intervals import bootstrap_ratio, wilson_over_prompts
from pipedraft.eval.paired import variance_parts
from pipedraft.eval.record import (
    AcceptanceLength,
    CategoryRecord,
    EntropyRecord,
    Interval,
    LosslessRecord,
    PromptRecord,
    RepeatsRecord,
    RunRecord,
    WallClockRecord,
)
from pipedraft.inference.result import DecodeResult

AUTOREGRESSIVE = "autoregressive"
"""Schedule and method name of the baseline."""
OVERALL = "overall"
"""In place of a benchmark: all of them pooled."""
ENTROPY_EDGES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0)
"""Nats. Each bin reaches from one to below the next, the last one to infinity; fixed, so that runs
can be compared bin by bin."""


# P conversations, M repeats


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


# -- acceptance by category, position and entropy --------------------------------------------------


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


def tested_tokens(result: DecodeResult) -> Iterator[tuple[int, bool]]:
    """Index in ``token_ids`` of every token that was tested against a draft token, and the outcome.

    Every token of a round but the last was a draft token that was right: the round went on with it.
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
    for index, accepted in tested_tokens(result):
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


# -- repeats: decoded again with the same random numbers, so the same tokens at other times --------


def decode_seconds(
    conversations: Sequence[Hashable], results: Sequence[DecodeResult]
) -> dict[Hashable, float]:
    """First to last token of each turn, as tokens/s counts them, summed over a conversation."""
    seconds: dict[Hashable, float] = {}
    for conversation, result in zip(conversations, results, strict=True):
        times_s = result.token_times_s
        own_s = times_s[-1] - times_s[0] if times_s else 0.0
        seconds[conversation] = seconds.get(conversation, 0.0) + own_s
    return seconds


def unequal_turns(repeats: Sequence[Mapping[Any, DecodeResult]]) -> int:
    """Turns whose tokens or steps are not the same in every repeat."""

    def outcome(turns: Mapping[Any, DecodeResult], key: Any) -> Any:
        return (turns[key].token_ids, turns[key].num_steps) if key in turns else None

    keys = dict.fromkeys(key for turns in repeats for key in turns)
    first, *others = repeats
    return sum(any(outcome(o, key) != outcome(first, key) for o in others) for key in keys)


def repeats_record(
    rows: Sequence[PromptRecord], repeats: Sequence[Mapping[Any, DecodeResult]]
) -> RepeatsRecord:
    """Variance components of the conversations' tokens per second, for results.json.

    Args:
        rows: with ``decode_s_repeats`` of length M.
        repeats: the turns by name, M times.

    Returns:
        Without components where fewer than two conversations took any time.
    """
    tokens_P = np.array([row.tokens for row in rows], dtype=np.float64)
    seconds_MP = np.array([row.decode_s_repeats for row in rows], dtype=np.float64).T
    found = RepeatsRecord(
        repeats=len(repeats),
        unequal_turns=unequal_turns(repeats),
        tokens_per_s=[ratio(float(tokens_P.sum()), float(s.sum())) for s in seconds_MP],
    )
    timed_P = (seconds_MP > 0).all(0)
    if timed_P.sum() < 2:
        return found
    parts = variance_parts(tokens_P[timed_P] / seconds_MP[:, timed_P])
    components = {k: v for k, v in vars(parts).items() if k != "num_repeats"}
    return msgspec.structs.replace(found, **components, repeat_share=parts.repeat_share)
