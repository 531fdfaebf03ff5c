"""Random numbers that are a function of the position, draws by them, and what a rejection sends."""

# V target vocabulary, K top entries, M samples

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from pipedraft.inference.config import MIN_TEMPERATURE
from pipedraft.inference.ranks.codec import Message, check_tensor
from pipedraft.inference.rules.filters import TokenFilters

UNFILTERED = TokenFilters()
UNDRAWABLE = (
    "probabilities: their sum is {}, so no token can be drawn; a weight of the target or the draft "
    "is NaN or infinite, load another checkpoint"
)
Purpose = Literal["target", "draft", "accept", "residual", "noise", "tail", "branch", "thin"]
"""noise: Gumbel's; tail, branch and thin: draws from a distribution that is known in parts."""


@dataclass(frozen=True)
class KeyedRandom:
    """Uniform numbers that are a function of (seed, prompt, position, purpose, attempt).

    Counter-based, so the numbers of a position do not depend on the schedule that reaches it, and
    no number serves two decisions.
    """

    seed: int
    prompt: int

    def uniform(self, position: int, purpose: Purpose, attempt: int = 0) -> float:
        """A number in [0, 1) with 53 random bits."""
        key = f"{self.seed}:{self.prompt}:{position}:{purpose}:{attempt}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53

    def uniforms(
        self, position: int, purpose: Purpose, count: int, attempt: int | None = None
    ) -> np.ndarray:
        """Uniform numbers, float64 [count] in [0, 1): by Philox, the same on every machine."""
        last = "" if attempt is None else f":{attempt}"
        key = f"{self.seed}:{self.prompt}:{position}:{purpose}{last}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        philox = np.random.Philox(key=int.from_bytes(digest, "big"))
        return np.random.Generator(philox).random(count)


def scaled(logits_V: Tensor, temperature: float, filters: TokenFilters = UNFILTERED) -> Tensor:
    """logits / temperature in float64, -inf where a token may not be drawn.

    No temperature above 0 overflows: below the smallest one that commands take, the largest logit
    is subtracted first, which would change the last bits of all others.
    """
    logits_V = logits_V.double()
    if temperature < MIN_TEMPERATURE:
        logits_V = logits_V - logits_V.amax(-1, keepdim=True)
    return filters.apply(logits_V / temperature)


def probabilities(
    logits_V: Tensor, temperature: float, filters: TokenFilters = UNFILTERED
) -> Tensor:
    """The distribution of samples, float64: sums over a large vocabulary stay exact."""
    return torch.softmax(scaled(logits_V, temperature, filters), -1)


def draw(probabilities_V: Tensor, uniform: float) -> int:
    """Inverse-CDF sample: the first token whose cumulative probability exceeds ``uniform``.

    The weights need not add up to 1. A token of probability 0 is never returned: uniforms are at
    most 1 - 2^-53, and that times the sum is less than the sum after rounding, too.

    Raises:
        ValueError: the weights add up to 0, infinity or NaN.
    """
    cumulative = probabilities_V.numpy(force=True).cumsum()
    if not 0 < cumulative[-1] < np.inf:
        raise ValueError(UNDRAWABLE.format(f"{cumulative[-1]:g}"))
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def draw_on_device(probabilities_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """``draw`` of each row where the rows are: int64 [R], on the CPU."""
    size, cumulative_RV = probabilities_RV.shape[1], probabilities_RV.cumsum(-1)
    uniform_R1 = torch.tensor(uniforms, dtype=torch.float64)[:, None].to(cumulative_RV.device)
    # A sum in parts may rise by a last bit where nothing is added.
    is_past_RV = (cumulative_RV > uniform_R1 * cumulative_RV[:, -1:]) & (probabilities_RV > 0)
    index_V = torch.arange(size, device=cumulative_RV.device)
    is_drawable_R1 = cumulative_RV[:, -1:].isfinite()
    tokens_R = torch.where(is_past_RV & is_drawable_R1, index_V, size).amin(-1).cpu()
    if bool((tokens_R == size).any()):
        raise ValueError(UNDRAWABLE.format("not positive and finite"))
    return tokens_R


class SharedNoise:
    """Numbers by which target and draft draw the same token where their distributions agree.

    The token of the smallest E_v / p_v, with E_v exponential, is distributed as p; the logarithm
    makes it the largest log p_v + g_v with Gumbel noise g_v = -log E_v.
    """

    NUM_KEPT: ClassVar[int] = 64
    """Positions whose numbers are kept: more than a tree is deep, for draft and target."""

    def __init__(self, random: KeyedRandom) -> None:
        self.random = random
        self._kept: dict[int, np.ndarray] = {}

    def exponential(self, position: int, size: int) -> np.ndarray:
        """Exponential numbers of a position, float64 [size]; a shorter one begins a longer."""
        kept = self._kept.get(position)
        if kept is None or len(kept) < size:
            if len(self._kept) >= self.NUM_KEPT:
                del self._kept[next(iter(self._kept))]
            with np.errstate(divide="ignore"):
                kept = -np.log(self.random.uniforms(position, "noise", size))
            self._kept[position] = kept
        return kept[:size]


# -- what a rejection carries across a network --------------------------------------------------


class Token(Message, tag="t"):
    """The token that stands where the draft token stood."""

    id: Annotated[int, Meta(ge=0, lt=2**31)]


class Logits(Message, tag="l"):
    """All of the target's logits: both sides compute the same probabilities of them, to the bit."""

    values: Tensor
    """float32 [V]."""

    def __post_init__(self) -> None:
        check_tensor("values", self.values, (torch.float32,), None)


class Top(Message, tag="k"):
    """The most likely tokens, the mass of the others, and draws from these."""

    ids: Tensor
    """int32 [K + M]: the K most likely tokens, then M drawn from the target's distribution over
    the others."""
    p: Tensor
    """float64 [K + M]: their probabilities under the whole distribution."""
    num_top: Annotated[int, Meta(ge=1)]
    """K."""
    tail_mass: Annotated[float, Meta(ge=0, le=1)]

    def __post_init__(self) -> None:
        check_tensor("ids", self.ids, (torch.int32,), None)
        check_tensor("p", self.p, (torch.float64,), len(self.ids))
        if self.num_top > len(self.ids) or self.ids.min() < 0:
            raise ValueError(f"ids: {len(self.ids)} of {self.num_top}, or a negative one")

    @property
    def num_samples(self) -> int:
        """M: drawn tokens behind the best ones."""
        return len(self.ids) - self.num_top


Payload: TypeAlias = Token | Logits | Top


@dataclass(frozen=True)
class DraftToken:
    """A draft token and the distribution that it was drawn from."""

    token: int
    q_V: Tensor | None = None
    """float64, over the target's vocabulary or its first tokens; None: not drawn at random."""

    @property
    def q(self) -> float:
        """Probability of the draft token, 1 where it was not drawn."""
        return 1.0 if self.q_V is None else float(self.q_V[self.token])
