"""Draft for pictures and tests: its first choice, its second, or neither is right, by a table.

The table is drawn once per position (Bernoulli). So every schedule runs with the same text and the
same luck, and a picture does not depend on the target's weights.
"""

# U vocabulary

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipedraft.inference.sources.tree_source import TreeSource
from pipedraft.inference.tree import TokenTree
from pipedraft.models.target import KeepRows

VOCABULARY = 64
LENGTH = 120
PROMPT = [3, 1, 4, 1, 5]
RIGHT, SECOND, MISSING = 0, 1, 2


def make_target() -> LlamaForCausalLM:
    """Return a random target with four layers and no end-of-sequence token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).float().eval().requires_grad_(False)


def greedy_text(target: Any) -> list[int]:
    """Return the prompt and the target's greedy continuation, by transformers alone."""
    ids = torch.tensor([PROMPT])
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH
    )
    return output[0].tolist()


def draw_luck(seed: int) -> list[int]:
    """Draw for each position: the draft's first choice is right, its second is, or neither."""
    generator = random.Random(seed)
    return generator.choices([RIGHT, SECOND, MISSING], weights=[72, 16, 12], k=2 * LENGTH)


class KnownText(TreeSource):
    """Draft that knows the text; like a language model it reads no hidden states."""

    def __init__(self, text: list[int], luck: list[int]) -> None:
        draft = SimpleNamespace(
            draft_ids=torch.arange(VOCABULARY),
            target_vocab_size=VOCABULARY,
            logits=lambda logits_U: logits_U,
        )
        super().__init__(draft)
        self.text, self.luck = text, luck
        self._root_is_new = True

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._restart()
        self._root_is_new = True

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        """Do nothing: the text is known."""

    def _root_output(self, tree: TokenTree) -> Tensor:
        self.num_forwards += self._root_is_new
        self._root_is_new = False
        return self._after(tree.root_position)

    def _compute(self, tree: TokenTree, rows: list[int]) -> None:
        self.num_forwards += 1
        self._root_is_new = False
        self._states |= {self._name(tree, row): self._after(tree.position(row)) for row in rows}

    def _keep_rows(self, keep: KeepRows) -> None:
        retained = keep.rows[keep.num_committed :]
        self._root_is_new = not (retained and retained[0] in self._states)
        super()._keep_rows(keep)

    def _after(self, position: int) -> Tensor:
        """Return the next token's logits [U]: the best one has about 0.73, the second 0.16.

        No two positions have the same odds. With equal scores, rounding would order the branches,
        and pictures would differ between processors.
        """
        position += 1
        right = self.text[position] if position < len(self.text) else 0
        order = [right, (right + 1) % VOCABULARY]
        if self.luck[position] == SECOND:
            order.reverse()
        elif self.luck[position] == MISSING:
            order = [(right + 1) % VOCABULARY, (right + 2) % VOCABULARY]
        logits_U = torch.zeros(VOCABULARY)
        logits_U[order[0]], logits_U[order[1]] = 6.0 + position * 37 % 101 / 1000, 4.5
        return logits_U
