"""Statistics against known truths: exact counts, synthetic data with a known ratio, Student's t."""

import json
import math

import numpy as np
import pytest

from pipedraft.eval.intervals import bootstrap_ratio, student_quantile
from pipedraft.eval.metrics import measure_times, run_record
from pipedraft.eval.record import LosslessRecord, RunRecord
from pipedraft.files import to_json
from pipedraft.inference.result import DecodeResult


def make_result(rounds, steps, stages=4, tests=(), accepts=(), times=()) -> DecodeResult:
    num_tokens = sum(rounds)
    return DecodeResult(
        prompt_ids=[1, 2],
        token_ids=list(range(num_tokens + 1)),
        text="",
        stop_reason="eos",
        num_stages=stages,
        num_steps=steps,
        round_lengths=list(rounds),
        position_tests=list(tests),
        position_accepts=list(accepts),
        virtual_time=steps / stages,
        virtual_time_autoregressive=float(num_tokens),
        token_times_s=list(times),
    )


LABEL = {
    "method": "spd", "schedule": "spd", "benchmark": "gsm8k", "temperature": 0.0, "tree_width": 1
}  # fmt: skip


def summarize(results: list[DecodeResult], **more) -> RunRecord:
    return run_record(results, **LABEL, **more)


def autoregressive_results(stages: int) -> list[DecodeResult]:
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 200, size=40)
    return [make_result([1] * n, stages * n, stages) for n in lengths.tolist()]


@pytest.mark.parametrize("stages", [1, 3, 4, 7, 16])
def test_autoregressive_decoding_has_length_exactly_one(stages: int) -> None:
    summary = summarize(autoregressive_results(stages))
    length = summary.equivalent_acceptance_length
    assert (length.pooled, length.mean, length.ci95) == (1.0, 1.0, (1.0, 1.0))
    assert summary.theoretical_speedup == 1.0
    assert summary.mean_acceptance_length == 1.0
    assert math.isnan(summary.draft_acceptance_rate)


def test_pooled_is_a_ratio_of_sums_and_mean_is_a_mean_of_ratios() -> None:
    short, long = make_result([2], 8), make_result([30], 40)
    summary = summarize([short, long]).equivalent_acceptance_length
    assert summary.pooled == pytest.approx(4 * 32 / 48)
    assert summary.mean == pytest.approx((4 * 2 / 8 + 4 * 30 / 40) / 2)
    assert summary.pooled != pytest.approx(summary.mean)


def test_turns_of_a_conversation_are_one_unit() -> None:
    turns = [make_result([3], 8), make_result([9], 12), make_result([5], 10)]
    summary = summarize(turns, conversations=["a", "a", "b"])
    assert (summary.prompts, summary.turns) == (2, 3)
    mean = summary.equivalent_acceptance_length.mean
    assert mean == pytest.approx((4 * 12 / 20 + 4 * 5 / 10) / 2)


def test_histogram_and_positions_add_up_to_the_counts() -> None:
    results = [
        make_result([1, 3, 3], 20, tests=[3, 2, 2], accepts=[2, 2, 1]),
        make_result([5, 1], 15, tests=[2, 1, 1, 1, 1], accepts=[1, 1, 1, 1]),
    ]
    summary = summarize(results)
    histogram = summary.acceptance_histogram
    assert sum(histogram) == summary.rounds == 5
    assert sum(j * count for j, count in enumerate(histogram)) == summary.tokens == 13
    assert summary.mean_acceptance_length == 13 / 5
    assert summary.position_tests == [5, 3, 3, 1, 1]
    assert summary.position_accepts == [3, 3, 2, 1, 0]
    assert summary.acceptance_by_position == pytest.approx([3 / 5, 1, 2 / 3, 1, 0])
    assert summary.draft_acceptance_rate == 9 / 13


def test_a_prompt_that_stopped_on_the_prefill_token_counts_no_steps() -> None:
    summary = summarize([make_result([], 0), make_result([4], 8), make_result([4], 8)])
    length = summary.equivalent_acceptance_length
    assert (summary.prompts, length.pooled, length.mean) == (3, 2.0, 2.0)


def test_a_single_conversation_has_no_interval() -> None:
    length = summarize([make_result([4], 8)]).equivalent_acceptance_length
    assert all(math.isnan(bound) for bound in length.ci95)


def test_mixed_numbers_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="num_stages"):
        summarize([make_result([4], 8, stages=4), make_result([4], 8, stages=8)])


def experiments(num_trials: int, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Two turns per conversation with a common rate; the true ratio of sums is 0.6."""
    rng = np.random.default_rng(11)
    length = rng.uniform(50, 150, size=(num_trials, num_prompts, 1))
    rate = rng.uniform(0.3, 0.9, size=(num_trials, num_prompts, 1))
    steps = rng.poisson(length, size=(num_trials, num_prompts, 2))
    tokens = rng.poisson(length * rate, size=(num_trials, num_prompts, 2))
    return tokens, steps


def coverage(tokens: np.ndarray, steps: np.ndarray) -> float:
    interval = bootstrap_ratio(tokens, steps, seed=5)
    return float(np.mean((interval[:, 0] <= 0.6) & (interval[:, 1] >= 0.6)))


@pytest.mark.parametrize(("degrees", "tolerance"), [(2, 0.01), (5, 2e-4), (15, 1e-6), (500, 1e-9)])
def test_quantile_of_students_t_agrees_with_scipy(degrees: int, tolerance: float) -> None:
    stdtrit = pytest.importorskip("scipy.special").stdtrit
    expected = stdtrit(degrees, 0.975)
    assert student_quantile(0.975, degrees) == pytest.approx(expected, rel=tolerance)


def test_interval_over_turns_instead_of_conversations_covers_too_seldom() -> None:
    """Known-bad variant: dependent turns taken for independent ones."""
    tokens, steps = experiments(2000, 40)
    assert coverage(tokens.reshape(2000, -1), steps.reshape(2000, -1)) < 0.9


def test_the_same_seed_gives_the_same_interval() -> None:
    results = [make_result([4] * k, 10 * k + 3) for k in range(1, 9)]
    first, same, other = (
        summarize(results, seed=seed).equivalent_acceptance_length.ci95 for seed in (4, 4, 5)
    )
    assert first == same != other


def test_wall_clock_leaves_the_prefill_out() -> None:
    assert summarize([make_result([4], 8)]).wallclock is None
    fast = make_result([4], 8, times=[0.5, 0.6, 0.6, 0.8, 0.9])
    slow = make_result([2], 8, times=[0.7, 1.0, 1.3])
    wallclock = summarize([fast, slow]).wallclock
    assert wallclock is not None
    assert wallclock.tokens_per_s == pytest.approx(6 / (0.4 + 0.6))
    assert wallclock.ttft_ms == pytest.approx(600)
    gaps_ms = [100, 0, 200, 100, 300, 300]
    assert wallclock.itl_ms_p50 == pytest.approx(np.quantile(gaps_ms, 0.5))
    assert wallclock.itl_ms_p99 == pytest.approx(np.quantile(gaps_ms, 0.99))


def test_record_measures_speedup_on_the_baseline() -> None:
    results = [make_result([4], 8, times=[0, 0.1, 0.2, 0.3, 0.4])]
    plain = measure_times([make_result([1] * 4, 16, times=[0, 0.2, 0.4, 0.6, 0.8])])
    lossless = LosslessRecord(checked=1, mismatches=0)
    wallclock = measure_times(results, plain.tokens_per_s)
    record = json.loads(to_json(summarize(results, lossless=lossless, wallclock=wallclock)))
    assert record["wallclock"]["speedup"] == pytest.approx(2)
    assert record["lossless"] == {"checked": 1, "mismatches": 0}
