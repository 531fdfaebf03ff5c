"""What one decoded prompt reports. Counts are stored; every ratio is computed from them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipedraft.inference.demands import Demands

if TYPE_CHECKING:
    from torch import Tensor

    from pipedraft.inference.rules.base import Verdict
    from pipedraft.inference.tree import TokenTree


def stop_reason(
    token: int,
    *,
    num_new: int,
    length: int,
    eos_token_ids: Iterable[int],
    max_new_tokens: int,
    limit: int,
) -> str:
    """Why the text ends with this token, as ``DecodeResult`` says it; "": it does not.

    Args:
        num_new: tokens behind the prompt, this one included.
        length: of the whole text.
        limit: positions of the target.
    """
    if token in eos_token_ids:
        return "eos"
    if num_new >= max_new_tokens:
        return "max_new_tokens"
    return "max_length" if length >= limit else ""


def shown(value: float) -> str:
    """Two digits; - where nothing was counted."""
    return "-" if math.isnan(value) else f"{value:.2f}"


class Observer:
    """Told of a sequence on its way, by the thread that decodes it."""

    demands: Demands = Demands()

    def start(self) -> None:
        """Start the clock: the prompt is computed next."""

    def logits(self, token: int, logits_V: "Tensor") -> None:
        """Take in the target's logits of the next token, if ``demands`` ask for them."""

    def token(self, token: int, is_drafted: bool) -> bool:
        """Take in a token that is certain.

        Args:
            is_drafted: a draft token that the target accepted, not the target's own.

        Returns:
            True to end the sequence with it.
        """
        return False

    def verified(self, tree: "TokenTree", walk: "Verdict") -> None:
        """Take in the verification of a segment, whose tokens follow."""

    def step(self, rows: Sequence[int]) -> None:
        """A pipeline step is over, in which each stage processed so many rows."""


@dataclass
class DecodeResult:
    """One prompt, decoded by one schedule.

    N and K follow the definition of the equivalent acceptance length: the token drawn from the
    prefill is neither in ``num_tokens`` nor in ``num_steps``.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    """Every new token: the one drawn from the prefill first, the EOS token last if one came."""
    text: str
    stop_reason: str
    """"eos", "max_new_tokens" or "max_length"; "stopped" by an ``Observer``."""
    num_stages: int
    num_steps: int = 0
    """K: elapsed pipeline steps (one step = one stage time), idle and rejecting ones included."""
    round_lengths: list[int] = field(default_factory=list)
    """Tokens emitted by each round (restart to restart), the correction or bonus token included."""
    round_ends: str = ""
    """A letter for each round, of its last token: r, a draft token was tested there and was wrong;
    u, no draft token was tested; a, the text ended on a draft token that was right."""
    round_drafted: list[int] = field(default_factory=list)
    """Draft tokens that joined the tree in each round."""
    round_forwards: list[int] = field(default_factory=list)
    """Forward passes of the draft in each round."""
    step_log: list[list[int]] = field(default_factory=list)
    """What the virtual clock was given, in order; see ``VirtualClock.log``."""
    position_tests: list[int] = field(default_factory=list)
    """Entry j: how often a draft token was tested as the j-th token of its round."""
    position_accepts: list[int] = field(default_factory=list)
    """Entry j: how many of these tests accepted the draft token."""
    num_drafted: int = 0
    """Draft tokens proposed (tree rows, the root excluded), tested or not."""
    num_draft_forwards: int = 0
    virtual_time: float = 0.0
    """T: modeled time of the steps, in units of one full target pass of one token."""
    virtual_time_autoregressive: float = 0.0
    """Modeled time of the same N tokens decoded autoregressively on the same pipeline."""
    prefill_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    """Wall-clock seconds after the start of the request at which each new token was emitted."""

    def emit(
        self,
        token: int,
        time_s: float,
        *,
        eos_token_ids: Iterable[int],
        max_new_tokens: int,
        limit: int,
    ) -> None:
        """A token is certain; sets ``stop_reason`` where the text ends with it.

        Args:
            limit: positions of the target.
        """
        self.token_ids.append(token)
        self.token_times_s.append(time_s)
        num_new = len(self.token_ids)
        self.stop_reason = stop_reason(
            token,
            num_new=num_new,
            length=len(self.prompt_ids) + num_new,
            eos_token_ids=eos_token_ids,
            max_new_tokens=max_new_tokens,
            limit=limit,
        )

    def count_test(self, place: int, is_accepted: bool) -> None:
        """Count a test of a draft token.

        Args:
            place: in its round; there is a test of each place before it.
        """
        if place == len(self.position_tests):
            self.position_tests.append(0)
            self.position_accepts.append(0)
        self.position_tests[place] += 1
        self.position_accepts[place] += is_accepted

    @property
    def num_tokens(self) -> int:
        """N: tokens emitted after the prefill token."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def num_tested(self) -> int:
        return sum(self.position_tests)

    @property
    def num_accepted(self) -> int:
        return sum(self.position_accepts)

    @property
    def equivalent_acceptance_length(self) -> float:
        """L' = n N / K; NaN when no step was needed."""
        return (
            self.num_stages * self.num_tokens / self.num_steps if self.num_steps else float("nan")
        )

    @property
    def mean_acceptance_length(self) -> float:
        """tau: tokens emitted per round."""
        if not self.round_lengths:
            return float("nan")
        return sum(self.round_lengths) / len(self.round_lengths)

    @property
    def draft_acceptance_rate(self) -> float:
        """alpha: accepted draft tokens per tested draft token."""
        return self.num_accepted / self.num_tested if self.num_tested else float("nan")

    @property
    def theoretical_speedup(self) -> float:
        """S: modeled autoregressive time over modeled time, for the same tokens."""
        if not self.virtual_time:
            return float("nan")
        return self.virtual_time_autoregressive / self.virtual_time
