"""What one sequence asks of its logits and its end, beside its configuration."""

# R rows, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Demands:
    """Demands of one sequence, as vLLM's requests have them."""

    ignores_eos: bool = False
    """The target's EOS tokens end nothing."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the sequence."""
    min_tokens: int = 0
    """New tokens before which none that ends the sequence may be drawn."""
    wants_logits: bool = False
    """The observer gets the target's logits of every emitted token."""

    @property
    def needs_logits(self) -> bool:
        return self.wants_logits or self.min_tokens > 0

    def ends(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens that end the sequence."""
        return (*(() if self.ignores_eos else eos_token_ids), *self.stop_token_ids)


@dataclass(frozen=True, kw_only=True)
class EndMask:
    """Removes tokens from the target's distributions at the first new positions."""

    token_ids: tuple[int, ...]
    end: int
    """First position at which they may stand."""

    def apply(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """Return logits of rows at these positions, each of which decides on the next one."""
        is_early_R = (positions_R + 1 < self.end).to(logits_RV.device)
        if not self.token_ids or not bool(is_early_R.any()):
            return logits_RV
        masked_RV = logits_RV.clone()
        for token in self.token_ids:
            masked_RV[:, token] = masked_RV[:, token].masked_fill(is_early_R, -math.inf)
        return masked_RV
