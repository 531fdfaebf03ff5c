"""Draft with an EAGLE or MTP head on the last rank, from the target's hidden states there.

vLLM's models pass the tapped layers' states from rank to rank. After each step the last rank gives
the head the states of the tokens that were right, and drafts as many tokens behind the sampled one
as there are further stages. They ride to the scheduler in the step's output.
"""

# T tokens of a request in a step, H hidden

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...models.heads.draft import load_draft
from ...models.heads.eagle import EagleHead
from ...models.target import KeepRows
from ...models.target_part import load_target_part
from ..rules.random import KeyedRandom
from ..rules.sampled import MatchVerifier
from ..shapes import TreeShape
from ..sources.base import DraftSampling
from ..sources.eagle import EagleSource
from ..tree import TokenTree

GREEDY = DraftSampling(MatchVerifier(0.0, KeyedRandom(0, 0)))
MAX_PENDING = 512
"""Tokens of a request that wait for the head, if no draft token is wanted."""
ROOT_ALONE = KeepRows((0,), 1)


class _Text:
    """What the head has been given of one request."""

    def __init__(self, source: EagleSource, end: int) -> None:
        self.source, self.end, self.num_pending = source, end, 0


class RankHead:
    """The head, and its state for every request."""

    def __init__(self, folder: str, target: str, num_tokens: int) -> None:
        """
        Args:
            folder: the head's checkpoint.
            target: the target's folder, for its embedding and LM head.
            num_tokens: draft tokens per step.

        Raises:
            ValueError: the checkpoint is no EAGLE or MTP head, or another target's.
        """
        part = load_target_part(target, layers=(), has_embedding=True, has_head=True)
        head = load_draft(folder, part)
        if not isinstance(head, EagleHead):
            raise ValueError(f"draft: {folder!r} is no EAGLE or MTP head; give one, or ngram")
        self.head, self.shape = head.eval(), TreeShape(kind="chain", depth=num_tokens)
        self.taps = tuple(sorted(set(head.taps)))
        self._texts: dict[str, _Text] = {}

    def forget(self, name: str) -> None:
        self._texts.pop(name, None)

    @torch.inference_mode()
    def read(
        self,
        name: str,
        start: int,
        tokens: Sequence[int],
        states: Sequence[Tensor],
        *,
        drafts: bool,
    ) -> list[int]:
        """Read a request's right tokens, and return draft tokens if they are wanted.

        Args:
            start: place of the first token. Another place than the next one restarts the request.
            tokens: tokens [T + 1], the one behind them last.
            states: hidden states [T, H] per tapped layer.
        """
        features: Mapping[int, Tensor] = dict(zip(self.taps, states, strict=True))
        text = self._texts.get(name)
        if text is None or text.end != start:
            text = self._texts[name] = _Text(EagleSource(self.head), start)
            text.source.begin(features, list(tokens))
        else:
            text.source.keep(ROOT_ALONE)
            text.source.observe(features, list(tokens[1:]))
        text.end = start + len(tokens) - 1
        text.num_pending += len(tokens) - 1
        if not drafts and text.num_pending < MAX_PENDING:
            return []
        text.num_pending = 0
        tree = TokenTree(tokens[-1], text.end)
        text.source.grow_tree(tree, self.shape, by_score=False, sampling=GREEDY)
        return tree.tokens[1:]
