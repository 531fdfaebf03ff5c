"""Draft-length policies for the edge, and the estimates they use.

The runtime calls a policy's ``choose`` before each round and ``observe`` after it. The number of
accepted tokens is censored, because a fully accepted round does not tell how many more tokens would
have been accepted. ``Geometric`` corrects for this. The published rules average the fraction of
accepted draft tokens, without this correction.
"""

# K draft lengths 1..max_length, or positions in a round

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from .channel import LinkEstimate, LinkState

MAX_AWAY = 32
"""Maximum batches in flight. A target stores twice as many messages."""


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    """Compute times and message sizes for one round. The sizes include headers."""

    draft_s: float
    """Time for one draft token on the edge."""
    verify_s: float
    """Time for the target's pass over a round without draft tokens."""
    verify_row_s: float = 0.0
    """Time added to the pass by each draft token."""
    up_bytes: int
    """Size of a request without draft tokens."""
    up_bytes_per_token: int
    down_bytes: int
    """Size of a verification result."""
    reject_bytes: int = 0
    """Size added to the result by a rejection, for the distribution to resample from."""


@dataclass(frozen=True)
class RoundCost:
    """Seconds per round for each draft length, and whether a bonus token follows."""

    hit_s_K: np.ndarray
    """Seconds for a round with all draft tokens accepted."""
    miss_s_K: np.ndarray
    """Seconds for a round with a rejected draft token."""
    has_bonus: bool = True
    """True: a full acceptance emits K + 1 tokens. False: it emits K tokens, because the next round
    is drafted already, and its first draft token is tested where the bonus token would be."""
    early_s_K: np.ndarray | float = 0.0
    """Seconds saved if the first token is rejected: its row may be computed during drafting."""

    @classmethod
    def stop_and_wait(cls, shape: RoundShape, link: LinkState, max_length: int) -> "RoundCost":
        """Return the cost in FlexSpec and DSSD, which draft, send, verify and answer in sequence.

        T_step = T_fixed + K T_marg        FlexSpec Eq. 10

        Unlike in Eq. 10, a round with a rejection may take longer, because its answer is larger.
        """
        drafted_K, away_K, reject_s = _times(shape, link, max_length)
        return cls(drafted_K + away_K, drafted_K + away_K + reject_s)

    @classmethod
    def asynchronous(cls, shape: RoundShape, link: LinkState, max_length: int) -> "RoundCost":
        """Return the cost in PicoSpec, which drafts the next round while one is in flight.

        E[T] = a^K max(T_d, RTT + T_v) + (1 - a^K) (T_d + RTT + T_v)      PicoSpec Eqs. 5-10
        """
        drafted_K, away_K, reject_s = _times(shape, link, max_length)
        hit_s_K = np.maximum(drafted_K, away_K)
        # After a rejection the next round was drafted in vain, so both times add up.
        return cls(hit_s_K, drafted_K + away_K + reject_s, has_bonus=False)

    @classmethod
    def pipelined(cls, shape: RoundShape, link: LinkState, max_length: int) -> "RoundCost":
        """Return the cost in PicoSpec, if enough rounds are in flight to hide link and cloud time.

        B = ceil((RTT + T_v) / T_d) rounds are enough. A fully accepted round costs only its
        drafting time, because earlier results arrive during drafting. The cloud verifies all
        arrived rows in one pass. A round drafted faster than it is verified therefore waits half a
        pass on average.
        """
        drafted_K, away_K, reject_s = _times(shape, link, max_length)
        verify_K = shape.verify_s + shape.verify_row_s * np.arange(1, max_length + 1)
        queue_K = np.where(drafted_K < verify_K, verify_K / 2, 0.0)
        return cls(drafted_K, drafted_K + away_K + queue_K + reject_s, has_bonus=False)

    @property
    def max_length(self) -> int:
        return len(self.hit_s_K)

    def expected_s(self, survival_K: np.ndarray) -> np.ndarray:
        """Return the mean seconds [K] per round with 1 to K draft tokens."""
        mean_s_K = survival_K * self.hit_s_K + (1 - survival_K) * self.miss_s_K
        return mean_s_K - (1 - survival_K[0]) * self.early_s_K

    def expected_tokens(self, survival_K: np.ndarray) -> np.ndarray:
        """Return 1 + S(1) + .. + S(K), the mean tokens [K] per round. Without bonus, omit S(K)."""
        tokens_K = 1 + np.cumsum(survival_K)
        return tokens_K if self.has_bonus else tokens_K - survival_K

    def best_length(self, survival_K: np.ndarray) -> int:
        """Return the length with the most mean tokens per mean second, the shortest one on ties."""
        rate_K = self.expected_tokens(survival_K) / self.expected_s(survival_K)
        return int(rate_K.argmax()) + 1


def _times(
    shape: RoundShape, link: LinkState, max_length: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return seconds to draft [K], then to the result [K], and extra seconds for a rejection."""
    assert link.up_bytes_per_s > 0 and link.down_bytes_per_s > 0, "an outage: ask the one before"
    number_K = np.arange(1, max_length + 1)
    up_bytes_K = shape.up_bytes + shape.up_bytes_per_token * number_K
    away_K = (
        link.round_trip_s
        + up_bytes_K / link.up_bytes_per_s
        + shape.verify_s
        + shape.verify_row_s * number_K
        + shape.down_bytes / link.down_bytes_per_s
    )
    return shape.draft_s * number_K, away_K, shape.reject_bytes / link.down_bytes_per_s


@dataclass(kw_only=True)
class Estimates:
    """Draft side's estimates of compute times and link. A new measurement has weight 1/8."""

    draft_s: float
    verify_s: float
    verify_row_s: float
    link: LinkEstimate
    header_bytes: int = 62
    """Bytes added to every message by the link."""

    def observe_draft(self, seconds: float) -> None:
        self.draft_s += (seconds - self.draft_s) / 8

    def observe_forward(self, seconds: float, num_rows: int) -> None:
        # One time cannot settle two unknowns: further rows keep their measured price.
        fixed_s = max(0.0, seconds - self.verify_row_s * max(num_rows - 1, 0))
        self.verify_s += (fixed_s - self.verify_s) / 8

    @property
    def away_s(self) -> float:
        """Return RTT + T_v, a batch's seconds in flight."""
        return self.link.state.round_trip_s + self.verify_s

    def window(self, batch_size: int) -> int:
        """Return ceil((RTT + T_v) / T_d), the batches in flight that let the edge draft on."""
        drafting_s = batch_size * self.draft_s
        # Free drafting can never hide the link, whatever the number in flight.
        # An exact multiple must not round up to one more.
        needed = math.ceil(self.away_s / drafting_s - 1e-9) if drafting_s else MAX_AWAY
        return min(max(needed, 1), MAX_AWAY)

    def round_cost(
        self,
        round_bytes: dict[str, int],
        max_length: int,
        *,
        drafts_on: bool,
        window: int | None,
        early: bool,
        needs_q: bool,
    ) -> RoundCost:
        """Return a round's cost for each draft length from the current estimates.

        ``round_bytes`` has the size fields of ``RoundShape``. ``drafts_on``, ``window`` and
        ``early`` come from the schedule. ``needs_q`` comes from the acceptance rule.
        """
        shape = RoundShape(
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            verify_row_s=self.verify_row_s,
            **round_bytes,
        )
        kind = RoundCost.pipelined
        if not drafts_on:
            kind = RoundCost.stop_and_wait
        elif window == 1:
            kind = RoundCost.asynchronous
        cost = kind(shape, self.link.state, max_length)
        if not early:
            return cost
        # The row that tests a round's first draft token may be computed while the edge drafts, and
        # without q also during the round trip, because the target knows the correction itself.
        spare_s = 0.0 if needs_q else self.link.state.round_trip_s
        # A pass that would end after the batch's arrival is not started (TargetSession._num_due).
        time_s_K = spare_s + self.draft_s * np.arange(1, max_length + 1)
        return replace(cost, early_s_K=np.where(time_s_K >= self.verify_s, self.verify_s, 0.0))


class DraftLengthPolicy(ABC):
    """Policy that chooses a draft length from 1 to ``max_length`` for each round.

    Length 0 is excluded, because a round without draft tokens teaches nothing about acceptance. A
    cloud that decodes alone can instead stream its tokens, without a round trip for each one.
    """

    def __init__(self, max_length: int) -> None:
        if max_length < 1:
            raise ValueError(f"draft_length.max_length: {max_length} is below 1; give 1 or more")
        self.max_length = max_length

    @abstractmethod
    def choose(self, cost: RoundCost) -> int:
        """Return the next round's draft length. ``cost`` covers the lengths 1 to ``max_length``."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:  # noqa: B027 (may stay empty)
        """Record a round's result."""


class Fixed(DraftLengthPolicy):
    """Use ``max_length`` in every round."""

    def choose(self, cost: RoundCost) -> int:
        return self.max_length


class _Published(DraftLengthPolicy):
    """Base of FlexSpec's published rules, which treat mean tokens as linear in gamma.

    gamma is a running average of the acceptance rate:

    gamma <- gamma + mu (tau / K - gamma)       gamma starts at 0.8; mu, not published, is 0.1 here

    tau of K draft tokens are accepted. S(k) is the probability that the first k are accepted. The
    estimate is biased, as its mean (S(1) + .. + S(K)) / K is the acceptance rate only for K = 1.
    """

    acceptance = 0.8

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.acceptance += 0.1 * (num_accepted / num_drafted - self.acceptance)

    def _best_of(self, tokens_K: np.ndarray, cost: RoundCost) -> int:
        # The published rules know no extra cost of a rejection.
        return int((tokens_K / cost.hit_s_K).argmax()) + 1


class Eq11(_Published):
    """K* = argmax gamma K / T_step(K)        FlexSpec Eq. 11, as published.

    gamma cancels, and K / (T_fixed + K T_marg) rises with K, so K* is always the largest K.
    """

    def choose(self, cost: RoundCost) -> int:
        return self._best_of(self.acceptance * np.arange(1, cost.max_length + 1), cost)


class Alg2(_Published):
    """K* = argmax (1 + gamma K) / T_step(K)      FlexSpec Algorithm 2, as published.

    The slope in K has the sign of gamma T_fixed - T_marg at every K, so the best K is 1 or
    ``max_length``. The biased gamma is too low after long rounds and correct after rounds of one
    token, so K can jump between both values.
    """

    def choose(self, cost: RoundCost) -> int:
        return self._best_of(1 + self.acceptance * np.arange(1, cost.max_length + 1), cost)


class Geometric(DraftLengthPolicy):
    """Default policy, which maximizes the token rate if all positions have the same acceptance.

    A round with K draft tokens emits (1 - a^(K + 1)) / (1 - a) tokens on average. The acceptance
    rate a is the number of accepted tokens divided by the number of tested ones:

        a = sum tau / sum (tau + [tau < K])     tau of K draft tokens are accepted

    This is the maximum-likelihood estimate for i.i.d. acceptance, except that old counts fade.
    """

    def __init__(
        self, max_length: int, *, memory: float = 32, acceptance: float = 0.8, weight: float = 2
    ) -> None:
        """
        Args:
            memory: number of rounds. Each round multiplies the counts by 1 - 1 / memory. With
                infinite memory, counts never fade.
            acceptance: prior acceptance rate.
            weight: weight of the prior, as a number of tested tokens. It does not fade.
        """
        super().__init__(max_length)
        self.keep, self.prior, self.weight = 1 - 1 / memory, acceptance, weight
        self.accepted = self.tested = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.accepted = self.accepted * self.keep + num_accepted
        # After a full acceptance the next test is unseen: it counts neither way.
        is_rejected = num_accepted < num_drafted
        self.tested = self.tested * self.keep + num_accepted + is_rejected

    @property
    def acceptance(self) -> float:
        # The prior's tests keep a few lucky rounds from moving the rate to 0 or 1.
        return (self.accepted + self.weight * self.prior) / (self.tested + self.weight)

    def survival(self) -> np.ndarray:
        """Return [K] probabilities a^k that the first k draft tokens are all accepted."""
        return self.acceptance ** np.arange(1, self.max_length + 1)

    def choose(self, cost: RoundCost) -> int:
        return cost.best_length(self.survival())


POLICIES: dict[str, type[DraftLengthPolicy]] = {
    "fixed": Fixed,
    "eq11": Eq11,
    "alg2": Alg2,
    "geometric": Geometric,
}
"""Policies by name."""


def parse_policy(text: str, *, max_length: int = 8) -> DraftLengthPolicy:
    """Return the policy with a name, which is ``fixed:K`` or another key of ``POLICIES``."""
    name, _, size = text.partition(":")
    if name == "fixed" and size.isdecimal() and int(size) <= max_length:
        return Fixed(int(size))
    if name not in POLICIES or name == "fixed" or size:
        names = ", ".join(name for name in POLICIES if name != "fixed")
        raise ValueError(
            f"policy: {text!r} is unknown; give fixed:1 to fixed:{max_length}, {names}"
        )
    return POLICIES[name](max_length)
