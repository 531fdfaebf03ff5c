"""Result for one decoded prompt, with its counts and the ratios computed from them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .demands import Demands

if TYPE_CHECKING:
    from torch import Tensor

    from .tree import TokenTree
    from .verdict import Verdict

ENDINGS = {
    "eos": "the model ended its answer",
    "max_new_tokens": "ended by --max-new-tokens",
    "max_length": "ended at the model's maximum length",
}
"""What commands print for a ``DecodeResult.stop_reason``."""


def stop_reason(
    token: int,
    *,
    num_new: int,
    length: int,
    eos_token_ids: Iterable[int],
    max_new_tokens: int,
    limit: int,
) -> str:
    """Return why decoding ends at this token, as in ``DecodeResult``, or "" if it continues.

    Args:
        num_new: token count after the prompt, including this one.
        length, limit: number of prompt and output tokens, and the target's maximum.
    """
    if token in eos_token_ids:
        return "eos"
    # Check EOS first: an output with EOS as its last allowed token has ended by itself.
    if num_new >= max_new_tokens:
        return "max_new_tokens"
    return "max_length" if length >= limit else ""


def shown(value: float) -> str:
    """Format a number with two decimals, and NaN as "-"."""
    return "-" if math.isnan(value) else f"{value:.2f}"


class Observer:
    """Callbacks about a running sequence, on the decoding thread."""

    demands: Demands = Demands()

    def start(self) -> None:
        """Start the clock before the prompt's forward pass."""

    def logits(self, token: int, logits_V: "Tensor") -> None:
        """Receive the target's logits for the next token, if requested in ``demands``."""

    def token(self, token: int, is_drafted: bool) -> bool:
        """Receive a verified token, drafted or not. Return True to end the sequence."""
        return False

    def verified(self, tree: "TokenTree", walk: "Verdict") -> None:
        """Receive a segment's verification result, before ``token`` gets its tokens."""

    def step(self, rows: Sequence[int]) -> None:
        """Receive each stage's row count in a finished pipeline step."""


@dataclass
class DecodeResult:
    """One prompt decoded with one schedule.

    N and K follow the definition of equivalent acceptance length: the token sampled at prefill
    counts neither in ``num_tokens`` nor in ``num_steps``.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    """Every new token: the prefill's token first, the EOS token last if reached."""
    text: str
    stop_reason: str
    """"eos", "max_new_tokens" or "max_length"; "stopped" by an ``Observer``."""
    num_stages: int
    num_steps: int = 0
    """K: elapsed pipeline steps (one step = one stage time), including idle and rejecting steps."""
    round_lengths: list[int] = field(default_factory=list)
    """Tokens emitted per round (restart to restart), including the correction or bonus token."""
    round_ends: str = ""
    """One letter per round about its last token: r, a draft token was rejected; u, no draft token
    was tested; a, decoding ended on an accepted draft token. Empty where the rounds' order is not
    known (``eval --endpoint``)."""
    round_drafted: list[int] = field(default_factory=list)
    """Draft tokens added to the tree, per round."""
    round_forwards: list[int] = field(default_factory=list)
    """Draft forwards per round."""
    step_log: list[list[int]] = field(default_factory=list)
    """Inputs to the virtual clock, in order; see ``VirtualClock.log``."""
    position_tests: list[int] = field(default_factory=list)
    """Entry j: number of draft tokens tested as the j-th token in a round."""
    position_accepts: list[int] = field(default_factory=list)
    """Entry j: how often the draft token was accepted in these tests."""
    num_drafted: int = 0
    """Draft tokens proposed (tree rows without the root), tested or not."""
    num_draft_forwards: int = 0
    virtual_time: float = 0.0
    """T: modeled time for the steps, in full target passes over one token."""
    virtual_time_autoregressive: float = 0.0
    """Modeled time to decode the same N tokens autoregressively on the same pipeline."""
    prefill_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    """Seconds from the request's start to each emitted token (wall clock)."""
    load_average: float | None = None
    """The machine's load average over one minute, at the end; None if it is not known."""

    def emit(
        self,
        token: int,
        time_s: float,
        *,
        eos_token_ids: Iterable[int],
        max_new_tokens: int,
        limit: int,
    ) -> None:
        """Append a verified token, and set ``stop_reason`` if decoding ends with this token."""
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
        """Count a draft token's test at its index in the round. Indices come in order from 0."""
        if place == len(self.position_tests):
            self.position_tests.append(0)
            self.position_accepts.append(0)
        self.position_tests[place] += 1
        self.position_accepts[place] += is_accepted

    @property
    def ending(self) -> str:
        """Why decoding ended, as commands print it."""
        return ENDINGS.get(self.stop_reason, self.stop_reason)

    @property
    def num_tokens(self) -> int:
        """Tokens emitted after the prefill token (N)."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def num_tested(self) -> int:
        return sum(self.position_tests)

    @property
    def num_accepted(self) -> int:
        return sum(self.position_accepts)

    @property
    def equivalent_acceptance_length(self) -> float:
        """L' = n N / K, NaN without steps."""
        return ratio(self.num_stages * self.num_tokens, self.num_steps)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens emitted per round (tau)."""
        return ratio(sum(self.round_lengths), len(self.round_lengths))

    @property
    def tokens_per_second(self) -> float:
        """Measured tokens per second after the prefill; NaN for a single token."""
        elapsed_s = self.token_times_s[-1] - self.prefill_s
        return self.num_tokens / elapsed_s if self.num_tokens else float("nan")

    @property
    def draft_acceptance_rate(self) -> float:
        """Fraction of the tested draft tokens that were accepted (alpha)."""
        return ratio(self.num_accepted, self.num_tested)

    @property
    def theoretical_speedup(self) -> float:
        """Modeled autoregressive time for the same tokens, divided by the modeled time (S)."""
        return ratio(self.virtual_time_autoregressive, self.virtual_time)


def ratio(numerator: float, denominator: float) -> float:
    """Divide, and return NaN instead of an error if nothing was counted."""
    return numerator / denominator if denominator else math.nan
