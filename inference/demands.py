"""Per-sequence demands on logits and stopping, in addition to the configuration."""

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
    """Demands for one sequence, as in vLLM requests."""

    ignores_eos: bool = False
    """Ignore the target's EOS tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids ending the sequence."""
    min_tokens: int = 0
    """New tokens required before any token may end the sequence."""
    wants_logits: bool = False
    """Pass the target's logits for every emitted token to the observer."""

    @property
    def needs_logits(self) -> bool:
        return self.wants_logits or self.min_tokens > 0

    def ends(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return all token ids that end the sequence: EOS unless ignored, and the stop tokens."""
        return (*(() if self.ignores_eos else eos_token_ids), *self.stop_token_ids)


@dataclass(frozen=True, kw_only=True)
class EndMask:
    """Removes tokens from the target's distributions at the first new positions."""

    token_ids: tuple[int, ...]
    end: int
    """First position where these tokens are allowed."""

    def changes(self, positions_R: Tensor) -> bool:
        """Return True if the mask removes tokens after a row at these positions."""
        return bool(self.token_ids) and bool(self._is_early(positions_R).any())

    def _is_early(self, positions_R: Tensor) -> Tensor:
        # The row at position t decides the token at t + 1.
        return positions_R + 1 < self.end

    def apply(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """Mask the logits of rows at these positions. A row's logits decide the token after it."""
        if not self.changes(positions_R):
            return logits_RV
        masked_RV, is_early_R = logits_RV.clone(), self._is_early(positions_R).to(logits_RV.device)
        for token in self.token_ids:
            masked_RV[:, token] = masked_RV[:, token].masked_fill(is_early_R, -math.inf)
        return masked_RV
