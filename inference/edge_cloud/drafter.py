"""A chain of guesses ahead of the text, from any draft that reads the text alone."""

# U draft vocabulary

from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.sources import DraftSource, make_source
from pipedraft.inference.tree import TokenTree
from pipedraft.models.target import Keep


class ChainDrafter:
    """The text, the guesses behind it, and a draft source that follows both.

    Each token costs one forward pass, and what was computed for a guess that becomes text stays.
    """

    def __init__(self, source: DraftSource) -> None:
        """
        Raises:
            ValueError: a draft that reads hidden states of the target.
        """
        if source.taps or "micro_batches" not in source.grows:
            raise ValueError(
                "draft: it reads hidden states of the target, which do not cross the link; give a "
                "FlexSpec draft or a language model"
            )
        self.source = source
        self._tree = TokenTree(0, 0)
        self.num_drafted = 0

    @classmethod
    def of(cls, draft: Any) -> "ChainDrafter":
        """``draft``: from ``load_draft`` or ``load_draft_model``."""
        return cls(make_source(draft))

    @property
    def draft_ids(self) -> Tensor:
        """int64 [U]: target token of each entry of the logits."""
        return self.source.draft_ids

    def begin(self, text: list[int]) -> None:
        self.source.begin({}, text)
        self._tree = TokenTree(text[-1], len(text) - 1)

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """[U]: of the token after the last guess, or after the text."""
        return self.source.leaf_logits(self._tree, [len(self._tree) - 1], {})[0]

    def add(self, token: int) -> None:
        """The next guess."""
        self._tree.add(len(self._tree) - 1, token, 0.0)
        self.num_drafted += 1

    @torch.inference_mode()
    def settle(self, num_accepted: int, token: int | None) -> None:
        """The first guesses are text; so is ``token`` behind them, and then the others are gone."""
        tree, emitted = self._tree, self._tree.tokens[1 : num_accepted + 1]
        if token is not None:
            keep = Keep(tuple(range(num_accepted + 1)), num_accepted + 1)
            self._tree = TokenTree(token, tree.position(num_accepted) + 1)
            emitted.append(token)
        elif num_accepted:
            keep = tree.keep_for(list(range(num_accepted)), tree.tokens[num_accepted])
            self._tree = tree.reroot(keep)
        else:
            return
        self.source.keep(keep)
        self.source.observe({}, emitted)
