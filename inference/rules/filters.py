"""Remove tokens from a distribution before sampling, as transformers does."""

# R rows, V vocabulary, K most likely (or most typical) tokens in order

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from ...errors import check_ranges

if TYPE_CHECKING:
    from torch import Tensor

FIRST_TOKENS = 64
"""Tokens sorted at first. They usually hold the requested mass."""


@dataclass(frozen=True, kw_only=True)
class TokenFilters:
    """Filters applied after the temperature, in field order.

    Order and meaning match ``GenerationMixin`` in transformers. Each filter works on the previous
    filter's renormalized result, and always keeps the most likely token. ``typical_p`` keeps the
    most typical token instead.
    """

    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Keep the K most likely tokens, including ties with the last one; 0: all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the smallest set of most likely tokens with total probability P (nucleus sampling)."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Keep tokens with at least P times the largest probability."""
    typical_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep tokens with surprisal nearest to the entropy, up to total probability P
    (arXiv:2202.00666)."""

    def __post_init__(self) -> None:
        shares = {"top_p": "(0, 1]", "min_p": "[0, 1]", "typical_p": "(0, 1]"}
        check_ranges(self, {"top_k": f"[0, {2**31})", **shares})

    def check_at(self, temperature: float) -> None:
        """Reject filters at temperature 0."""
        if temperature == 0 and self.active:
            name, value = next(iter(self.active.items()))
            raise ValueError(
                f"{name}: {value:g} filters samples, but temperature 0 is greedy; give a "
                "temperature above 0, or leave it out"
            )

    @property
    def filters(self) -> TokenFilters:
        """Return the filters without the further fields of a subclass."""
        return TokenFilters(**self.active)  # type: ignore[arg-type]  # by field name

    @property
    def active(self) -> dict[str, float]:
        """Return active filters by name."""
        values = {part: getattr(self, part.name) for part in fields(TokenFilters)}
        return {part.name: value for part, value in values.items() if value != part.default}

    @property
    def reads_on_host(self) -> bool:
        """True if ``apply`` reads values on the host, which is impossible in a CUDA graph."""
        return self.top_p < 1 or self.typical_p < 1

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Set removed tokens to -inf in logits [..., V] already divided by the temperature."""
        if 0 < self.top_k < logits_RV.shape[-1]:
            # Compare with the last value, not by index: ties with it stay, as in transformers.
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
    """Return temperature and active filters as a label for tables, such as "1, top-k 50"."""
    filters = (f", {name.replace('_', '-')} {value:g}" for name, value in active.items())
    return f"{temperature:g}" + "".join(filters)


def _in_nucleus(logits_RV: Tensor, top_p: float) -> Tensor:
    """Return bool [..., V]: True for tokens preceded by less than ``top_p`` of the mass."""
    logits_RK, p_RK = _ordered(logits_RV, logits_RV.softmax(-1), top_p)
    # Mass before each token: the one that crosses top_p is still in.
    count_R1 = (p_RK.cumsum(-1) - p_RK < top_p).sum(-1, keepdim=True)
    last_R1 = logits_RK.gather(-1, (count_R1 - 1).clamp_min(0))
    # Among ties at the edge keep the first; in transformers this depends on the machine.
    above_RV, tied_RV = logits_RV > last_R1, logits_RV == last_R1
    room_R1 = count_R1 - above_RV.sum(-1, keepdim=True)
    return above_RV | (tied_RV & (tied_RV.cumsum(-1) <= room_R1))


def _is_typical(logits_RV: Tensor, typical_p: float) -> Tensor:
    """Return bool [..., V], True for the most typical tokens and for ties with the last one."""
    logp_RV = logits_RV.log_softmax(-1)
    p_RV = logp_RV.exp()
    # nansum: a removed token gives -inf times 0, which is NaN.
    entropy_R1 = -(logp_RV * p_RV).nansum(-1, keepdim=True)
    distance_RV = (-logp_RV - entropy_R1).abs()
    nearness_RK, p_RK = _ordered(-distance_RV, p_RV, typical_p)
    last_R1 = (p_RK.cumsum(-1) < typical_p).sum(-1, keepdim=True)
    return -distance_RV >= nearness_RK.gather(-1, last_R1.clamp_max(p_RK.shape[-1] - 1))


def _ordered(order_RV: Tensor, p_RV: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Return the first K entries in descending order and their probabilities (sum >= ``mass``).

    A few tokens hold nearly all of a language model's mass. Growing a ``topk`` until it suffices
    for every row is faster than sorting the vocabulary.
    """
    size, vocab_size = FIRST_TOKENS, order_RV.shape[-1]
    while True:
        order_RK, index_RK = order_RV.topk(min(size, vocab_size))
        p_RK = p_RV.gather(-1, index_RK)
        if size >= vocab_size or bool((p_RK.sum(-1) >= mass).all()):
            return order_RK, p_RK
        # Flat distributions need many tokens; a few tries reach the whole vocabulary.
        size *= 8
