"""Filters of sampling: tokens that may be drawn at all, as transformers chooses them."""

# R rows, V vocabulary, K likeliest (or most typical) tokens in order

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

if TYPE_CHECKING:
    from torch import Tensor

FIRST_TOKENS = 64
"""That are sorted before more are: most often they hold the mass that is asked for."""


@dataclass(frozen=True, kw_only=True)
class TokenFilters:
    """What a distribution keeps after the temperature, in the order of the fields.

    The order and the meaning of ``GenerationMixin`` of transformers: each filter works on what the
    one before it left, renormalized, and the likeliest (or most typical) token always stays.
    """

    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """The K most likely tokens, those that tie with the last one included; 0: all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The fewest most likely tokens whose probabilities add up to P (nucleus sampling)."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Tokens with at least the share P of the largest probability."""
    typical_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The tokens whose surprisal is nearest to the entropy, until they add up to P
    (arXiv:2202.00666)."""

    def __post_init__(self) -> None:
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k: {self.top_k} is out of range; give 1 or more, 0 for all")
        for name, lowest in (("top_p", 0), ("min_p", None), ("typical_p", 0)):
            value = getattr(self, name)
            if not 0 <= value <= 1 or value == lowest:
                fix = "give 0 to 1" if lowest is None else "give more than 0, at most 1"
                raise ValueError(f"{name}: {value} is out of range; {fix}")

    def check_at(self, temperature: float) -> None:
        """Refuse filters at a temperature where nothing is sampled.

        Raises:
            ValueError: something is filtered, and nothing is sampled.
        """
        if temperature == 0 and self.active:
            name, value = next(iter(self.active.items()))
            raise ValueError(
                f"{name}: {value:g} filters samples, but temperature 0 is greedy; give a "
                "temperature above 0, or leave it out"
            )

    @property
    def filters(self) -> TokenFilters:
        """Nothing but the filters, where a subclass has more."""
        return TokenFilters(
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(TokenFilters)}
        )

    @property
    def active(self) -> dict[str, float]:
        """Filters that remove something, by name."""
        values = (
            (f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(TokenFilters)
        )
        return {name: value for name, value, default in values if value != default}

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Logits [..., V] that were divided by the temperature; -inf for every removed token."""
        if 0 < self.top_k < logits_RV.shape[-1]:
            last_R1 = logits_RV.topk(self.top_k).values[..., -1:]
            logits_RV = logits_RV.masked_fill(logits_RV < last_R1, -math.inf)
        if self.top_p < 1:
            logits_RV = logits_RV.masked_fill(~_in_nucleus(logits_RV, self.top_p), -math.inf)
        if self.min_p:
            p_RV = logits_RV.softmax(-1)
            too_small_RV = p_RV < self.min_p * p_RV.amax(-1, keepdim=True)
            logits_RV = logits_RV.masked_fill(too_small_RV, -math.inf)
        if self.typical_p < 1:
            logits_RV = logits_RV.masked_fill(~_is_typical(logits_RV, self.typical_p), -math.inf)
        return logits_RV


def sampling_label(temperature: float, active: Mapping[str, float]) -> str:
    """Temperature and active filters for tables, "1, top-k 50"; who differs here is not alike."""
    filters = (f", {name.replace('_', '-')} {value:g}" for name, value in active.items())
    return f"{temperature:g}" + "".join(filters)


def _in_nucleus(logits_RV: Tensor, top_p: float) -> Tensor:
    """bool [..., V]: tokens before which less than ``top_p`` of the mass lies."""
    logits_RK, p_RK = _ordered(logits_RV, logits_RV.softmax(-1), top_p)
    count_R1 = (p_RK.cumsum(-1) - p_RK < top_p).sum(-1, keepdim=True)
    last_R1 = logits_RK.gather(-1, (count_R1 - 1).clamp_min(0))
    # Of equal tokens at the edge the first ones stay; in transformers it depends on the machine.
    above_RV, tied_RV = logits_RV > last_R1, logits_RV == last_R1
    room_R1 = count_R1 - above_RV.sum(-1, keepdim=True)
    return above_RV | (tied_RV & (tied_RV.cumsum(-1) <= room_R1))


def _is_typical(logits_RV: Tensor, typical_p: float) -> Tensor:
    """bool [..., V]: tokens nearest to the entropy, ties with the last one included."""
    logp_RV = logits_RV.log_softmax(-1)
    p_RV = logp_RV.exp()
    entropy_R1 = -(logp_RV * p_RV).nansum(-1, keepdim=True)
    distance_RV = (-logp_RV - entropy_R1).abs()
    nearness_RK, p_RK = _ordered(-distance_RV, p_RV, typical_p)
    last_R1 = (p_RK.cumsum(-1) < typical_p).sum(-1, keepdim=True)
    return -distance_RV >= nearness_RK.gather(-1, last_R1.clamp_max(p_RK.shape[-1] - 1))


def _ordered(order_RV: Tensor, p_RV: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """The first K entries in descending order, and their probabilities, which reach ``mass``.

    A few tokens hold nearly all of a language model's distribution, so that a ``topk``, grown until
    it suffices for every row, replaces the sort of the vocabulary.
    """
    size, vocab_size = FIRST_TOKENS, order_RV.shape[-1]
    while True:
        order_RK, index_RK = order_RV.topk(min(size, vocab_size))
        p_RK = p_RV.gather(-1, index_RK)
        if size >= vocab_size or bool((p_RK.sum(-1) >= mass).all()):
            return order_RK, p_RK
        size *= 8
