"""Drafts without a network: the next token by what followed the same tokens before in the text.

They cost no forward pass and no training. Like every draft they have a type, a vocabulary and a
cost; `inference/sources/lookup.py` has what they do.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LookupKind = Literal["ngram", "suffix"]


class Lookup(nn.Module):
    """A draft without a network, as an engine sees it."""

    draft_type: ClassVar[LookupKind]
    num_stages: ClassVar[int | None] = None
    boundaries: ClassVar[tuple[int, ...]] = ()
    draft_ids: Tensor

    def __init__(self, vocab_size: int) -> None:
        """
        Args:
            vocab_size: of the target.
        """
        super().__init__()
        self.target_vocab_size = vocab_size
        self.register_buffer("draft_ids", torch.arange(vocab_size))

    def logits(self, log_probability_V: Tensor) -> Tensor:
        """Log-probabilities that the source has looked up, unchanged."""
        return log_probability_V

    def relative_cost(self, target: Any) -> float:
        return 0.0


class NGram(Lookup):
    """Draft tokens looked up by the last few tokens."""

    draft_type: ClassVar[LookupKind] = "ngram"


class Suffix(Lookup):
    """Draft tokens looked up by the longest end of the text that occurred before."""

    draft_type: ClassVar[LookupKind] = "suffix"


LOOKUPS: dict[LookupKind, type[Lookup]] = {"ngram": NGram, "suffix": Suffix}


def make_lookup(kind: LookupKind, target: PreTrainedModel) -> Lookup:
    return LOOKUPS[kind](int(target.config.get_text_config().vocab_size))
