"""Expected figures of simple schedules, from acceptance rates alone."""

from collections.abc import Sequence

import numpy as np


def chain_acceptance_length(acceptance: float, draft_length: int) -> float:
    """Tokens per round of a chain of m drafts with i.i.d. acceptance: (1 - a^(m+1)) / (1 - a)."""
    if acceptance == 1.0:
        return float(draft_length + 1)
    return (1 - acceptance ** (draft_length + 1)) / (1 - acceptance)


def micro_batch_acceptance_length(acceptance: float, size: int, num_stages: int) -> float:
    """Equivalent acceptance length of a chain of ``size`` draft tokens at every step (PipeInfer).

    L' = 1 / ((1 - a) + a / (m n)) with i.i.d. acceptance, if rounds filled their micro-batches.
    """
    return 1.0 / ((1.0 - acceptance) + acceptance / (size * num_stages))


def continuous_acceptance_length(acceptance: Sequence[float], num_stages: int) -> float:
    """Equivalent acceptance length of one draft token per step (SPD, PPSD, PipeDec).

    L' = n E / (n + E - 1), with E = 1 + sum_j prod_{i<=j} a_i the tokens of a round: the first
    token of a round costs n steps, every further one a single step. With equal a_i this is
    1 / ((1 - a) + a / n).

    Args:
        acceptance: a_1.. by position in the round, the last one holds for all later positions.
            The j-th draft token of a round is drawn while min(j, n) tokens are in flight.
    """
    rates = np.asarray(acceptance, dtype=np.float64)
    if rates[-1] >= 1:
        return float(num_stages)
    reached = np.cumprod(rates)
    before_last = reached[-2] if len(rates) > 1 else 1.0
    tokens = 1 + reached[:-1].sum() + before_last * rates[-1] / (1 - rates[-1])
    return float(num_stages * tokens / (num_stages + tokens - 1))
