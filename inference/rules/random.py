"""Counter-based random numbers keyed by position, sampling with them, and rejection payloads."""

# V target vocabulary, K top entries, M samples

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from ...models.speed.cuda_graphs import TokenChoice
from ..messages import Message, check_tensor
from ..verdict import NO_TOKEN, UNDRAWABLE, NotFinite
from .filters import TokenFilters
from .temperature import MIN_TEMPERATURE

UNFILTERED = TokenFilters()


Purpose = Literal["target", "draft", "accept", "residual", "noise", "tail", "branch", "thin"]
"""Purpose of a random number; tail, branch and thin sample a partly known distribution."""


@dataclass(frozen=True)
class KeyedRandom:
    """Uniform random numbers as a function of (seed, prompt, position, purpose, attempt).

    The numbers at a position are the same under every schedule, and two decisions never share a
    number.
    """

    seed: int
    prompt: int

    def uniform(self, position: int, purpose: Purpose, attempt: int = 0) -> float:
        """Return a number in [0, 1) with 53 random bits."""
        key = f"{self.seed}:{self.prompt}:{position}:{purpose}:{attempt}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        # 53 bits fit a float64 exactly, so 1.0 never comes out.
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53

    def uniforms(
        self, position: int, purpose: Purpose, count: int, attempt: int | None = None
    ) -> np.ndarray:
        """Return float64 [count] in [0, 1) from Philox, which is the same on all machines."""
        last = "" if attempt is None else f":{attempt}"
        key = f"{self.seed}:{self.prompt}:{position}:{purpose}{last}".encode()
        # Philox takes a 128-bit key.
        digest = hashlib.blake2b(key, digest_size=16).digest()
        philox = np.random.Philox(key=int.from_bytes(digest, "big"))
        return np.random.Generator(philox).random(count)


def scaled(logits_V: Tensor, temperature: float, filters: TokenFilters = UNFILTERED) -> Tensor:
    """Return logits / temperature in float64, -inf for tokens removed by the filters.

    No temperature above 0 overflows, because below ``MIN_TEMPERATURE`` the largest logit is
    subtracted first. At other temperatures the subtraction would change the last bits.
    """
    logits_V = logits_V.double()
    if temperature < MIN_TEMPERATURE:
        logits_V = logits_V - logits_V.amax(-1, keepdim=True)
    return filters.apply(logits_V / temperature)


def probabilities(
    logits_V: Tensor, temperature: float, filters: TokenFilters = UNFILTERED
) -> Tensor:
    """Return the sampling distribution in float64, so sums over a large vocabulary stay exact."""
    return torch.softmax(scaled(logits_V, temperature, filters), -1)


def draw(probabilities_V: Tensor, uniform: float) -> int:
    """Return the first token with cumulative probability above ``uniform`` (inverse CDF).

    The weights need not sum to 1. A token with probability 0 is never returned, because ``uniform``
    is at most 1 - 2^-53. Its product with the sum stays below the sum, even after rounding.

    Raises:
        ValueError: the weights sum to 0, infinity or NaN.
    """
    # On the CPU, one after the other: the order of additions decides the last bit.
    cumulative = probabilities_V.numpy(force=True).cumsum()
    if not 0 < cumulative[-1] < np.inf:
        raise NotFinite(UNDRAWABLE.format(f"{cumulative[-1]:g}"))
    # side=right: a uniform of 0 must skip leading tokens with weight 0.
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def draw_on_device(probabilities_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Run ``draw`` for each row on the rows' device. Return ``drawn_tokens`` on the CPU."""
    uniform_R = torch.tensor(uniforms, dtype=torch.float64).to(probabilities_RV.device)
    return drawn_tokens(probabilities_RV, uniform_R).cpu()


def drawn_tokens(probabilities_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Run ``draw`` without the host. Return int64 [R], ``NO_TOKEN`` if none can be drawn."""
    size, cumulative_RV = probabilities_RV.shape[1], probabilities_RV.cumsum(-1)
    least_RV = uniform_R[:, None] * cumulative_RV[:, -1:]
    # A parallel cumulative sum may rise by a last bit at a zero weight.
    is_past_RV = (cumulative_RV > least_RV) & (probabilities_RV > 0)
    index_V = torch.arange(size, device=cumulative_RV.device)
    is_drawable_R1 = cumulative_RV[:, -1:].isfinite()
    tokens_R = torch.where(is_past_RV & is_drawable_R1, index_V, size).amin(-1)
    return torch.where(tokens_R < size, tokens_R, NO_TOKEN)


def greedy_tokens(logits_RV: Tensor) -> Tensor:
    """Return the most likely tokens, int64 [R], ``NO_TOKEN`` if a logit is NaN or infinity.

    A NaN counts as the largest logit, so only the largest one is looked at.
    """
    tokens_R = logits_RV.argmax(-1)
    largest_R1 = logits_RV.gather(-1, tokens_R[:, None])
    return torch.where(largest_R1[:, 0].isfinite(), tokens_R, NO_TOKEN)


NO_NUMBERS = torch.zeros(0, dtype=torch.float64)
ALL_LOGITS = TokenChoice("logits", NO_NUMBERS, lambda logits_RV, _: logits_RV)
"""Makes no choice, so the graph ends with the logits."""
GREEDY = TokenChoice("greedy", NO_NUMBERS, lambda logits_RV, _: greedy_tokens(logits_RV))


def sampled_tokens(filters: TokenFilters, logits_RV: Tensor, numbers: Tensor) -> Tensor:
    """Sample as ``draw_on_device`` does. ``numbers`` has the temperature, then one per row."""
    # The temperature is data: clients choose it, and a constant would need a graph per value.
    scaled_RV = filters.apply(logits_RV.double() / numbers[0])
    return drawn_tokens(torch.softmax(scaled_RV, -1), numbers[1 : 1 + len(logits_RV)])


class SharedNoise:
    """Noise shared by target and draft, which then sample the same token from equal distributions.

    With independent exponential numbers E_v, the token v with the smallest E_v / p_v is a sample
    from p. It is also the token with the largest log p_v + g_v, with Gumbel noise g_v = -log E_v.
    """

    NUM_KEPT: ClassVar[int] = 64
    """Number of positions cached for draft and target, more than a tree's depth."""

    def __init__(self, random: KeyedRandom) -> None:
        self.random = random
        self._kept: dict[int, np.ndarray] = {}

    def exponential(self, position: int, size: int) -> np.ndarray:
        """Return a position's exponential numbers, float64 [size]. A larger size extends them."""
        kept = self._kept.get(position)
        if kept is None or len(kept) < size:
            if len(self._kept) >= self.NUM_KEPT:
                # Dicts keep insertion order, so this drops the oldest position.
                del self._kept[next(iter(self._kept))]
            with np.errstate(divide="ignore"):
                kept = -np.log(self.random.uniforms(position, "noise", size))
            self._kept[position] = kept
        return kept[:size]


# -- what a rejection carries across a network --------------------------------------------------


class Token(Message, tag="t"):
    """Token that replaces the rejected draft token."""

    id: Annotated[int, Meta(ge=0, lt=2**31)]


class Logits(Message, tag="l"):
    """All target logits, from which both sides compute bitwise equal probabilities."""

    values: Tensor
    """float32 [V]."""

    def __post_init__(self) -> None:
        check_tensor("values", self.values, (torch.float32,), None)


class Top(Message, tag="k"):
    """Most likely tokens, the remaining tokens' mass, and samples from the remaining tokens."""

    ids: Tensor
    """int32 [K + M]: the K most likely tokens, then M samples from the target's distribution over
    the others."""
    p: Tensor
    """float64 [K + M]: their probabilities under the whole distribution."""
    num_top: Annotated[int, Meta(ge=1)]
    """K: number of most likely tokens."""
    tail_mass: Annotated[float, Meta(ge=0, le=1)]

    def __post_init__(self) -> None:
        check_tensor("ids", self.ids, (torch.int32,), None)
        check_tensor("p", self.p, (torch.float64,), len(self.ids))
        if self.num_top > len(self.ids) or self.ids.min() < 0:
            raise ValueError(f"ids: {len(self.ids)} of {self.num_top}, or a negative one")

    @property
    def num_samples(self) -> int:
        """M: number of samples after the top tokens."""
        return len(self.ids) - self.num_top


Payload: TypeAlias = Token | Logits | Top


@dataclass(frozen=True)
class DraftToken:
    """Draft token and the distribution it was sampled from."""

    token: int
    q_V: Tensor | None = None
    """float64, over the target's vocabulary or its first tokens; None: not sampled."""

    @property
    def q(self) -> float:
        """Probability of the draft token, or 1 if it was not sampled."""
        return 1.0 if self.q_V is None else float(self.q_V[self.token])
