"""Drafts without a network: the next token by what followed the same tokens before in the text.

They cost no forward pass and no training. Like every draft they have a type, a vocabulary and a
cost; `inference/sources/lookup.py` has what they do.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LookupKind = Literal["ngram", "suffix"]
"""By the last few tokens, or by the longest end of the text that occurred before."""


class Lookup(nn.Module):
    """A draft without a network, as an engine sees it."""

    num_stages: ClassVar[int | None] = None
    boundaries: ClassVar[tuple[int, ...]] = ()
    draft_ids: Tensor

    def __init__(self, draft_type: LookupKind, vocab_size: int) -> None:
        """
        Args:
            vocab_size: of the target.
        """
        super().__init__()
        self.draft_type = draft_type
        self.target_vocab_size = vocab_size
        self.register_buffer("draft_ids", torch.arange(vocab_size))

    def logits(self, log_probability_V: Tensor) -> Tensor:
        """Log-probabilities that the source has looked up, unchanged."""
        return log_probability_V

    def relative_cost(self, target: Any) -> float:
        return 0.0


def make_lookup(kind: LookupKind, target: PreTrainedModel) -> Lookup:
    return Lookup(kind, int(target.config.get_text_config().vocab_size))
