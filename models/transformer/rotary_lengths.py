"""Rotary tables that follow the length of the text: longrope and dynamic NTK.

transformers chooses such frequencies once per call, by the largest position in it, for all rows of
the call. `generate` computes a prompt in one call and then row by row. So a prompt's rows turn by
the prompt's length, and each later row by its own position, whatever rows share our passes.

Some families (Phi-3) go further: when the text outgrows the context of the short factors,
`generate` drops its cache and computes all rows again with the long ones.
"""

# l rows, D head size

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

FOLLOWING = ("dynamic", "longrope")
"""Rotary types whose table depends on the longest position in the call."""
Turns = tuple[Tensor, Tensor]
"""Cosines and sines [1, l, D]."""


def short_lengths(config: PreTrainedConfig) -> dict[str | None, int]:
    """Return the longest text with the usual frequencies, per layer kind with a following table.

    The kind is None for one table for all layers.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {None: rope} if "rope_type" in rope else rope
    found = {}
    for kind, own in kinds.items():
        if isinstance(own, dict) and own.get("rope_type") in FOLLOWING:
            is_long = own["rope_type"] == "longrope"
            known = own.get("original_max_position_embeddings") if is_long else None
            found[kind] = int(known or config.max_position_embeddings)
    return found


def recompute_length(model: PreTrainedModel) -> int | None:
    """Return the text length at which `generate` computes all rows again, None if it never does."""
    config = model.get_decoder().config
    known = getattr(config, "original_max_position_embeddings", None)
    if not known or not short_lengths(config):
        return None
    cache, row = DynamicCache(), torch.zeros(1, 1, 1, 1).expand(1, 1, known, 1)
    cache.update(row, row, 0)
    ids = torch.zeros(1, known + 1, dtype=torch.long)
    given = model.prepare_inputs_for_generation(  # type: ignore[operator]
        ids, past_key_values=cache, attention_mask=torch.ones_like(ids), use_cache=True
    )
    return known + 1 if given.get("past_key_values") is not cache else None


def forget_lengths(model: PreTrainedModel) -> None:
    """Give a model a new rotary module, because a dynamic one remembers the longest text."""
    decoder: Any = model.get_decoder()
    if short_lengths(decoder.config):
        decoder.rotary_emb = _fresh(decoder.rotary_emb, decoder.config)


def _fresh(rotary: Any, config: PreTrainedConfig) -> nn.Module:
    fresh: nn.Module = type(rotary)(config=config)
    return fresh.to(next(rotary.buffers()).device)


class FollowingTable:
    """A rotary module, called with each row's own text length."""

    def __init__(self, rotary: Any, config: PreTrainedConfig) -> None:
        self._fresh = _fresh(rotary, config)  # the model's own may have seen longer texts
        self._short = short_lengths(config)

    def __call__(
        self, hidden_1lH: Tensor, ids_1l: Tensor, kind: str | None, length: int | None
    ) -> Turns:
        """Return the rows' tables.

        Args:
            kind: layer kind, for modules with a table for each.
            length: text length for all rows; None: each row ends its own text.
        """
        own_l = ids_1l[0] + 1 if length is None else torch.full_like(ids_1l[0], length)
        # Up to the short length, the length changes nothing.
        own_l = own_l.clamp(min=self._short.get(kind, 0))
        lengths = own_l.unique().tolist()
        if len(lengths) == 1:
            return self._turn(hidden_1lH, ids_1l, kind, lengths[0])
        groups = [(own_l == one).nonzero()[:, 0] for one in lengths]
        parts = [
            self._turn(hidden_1lH, ids_1l[:, rows_l], kind, one)
            for rows_l, one in zip(groups, lengths, strict=True)
        ]
        in_order = torch.cat(groups).argsort()
        cos_1lD, sin_1lD = (
            torch.cat(tables, 1)[:, in_order] for tables in zip(*parts, strict=True)
        )
        return cos_1lD, sin_1lD

    def _turn(self, hidden_1lH: Tensor, ids_1l: Tensor, kind: str | None, length: int) -> Turns:
        rotary: Any = deepcopy(self._fresh) if length > self._short.get(kind, 0) else self._fresh
        # One more position sets the length of the call; its row is dropped.
        ids = torch.cat([ids_1l, ids_1l.new_full((1, 1), length - 1)], 1)
        cos, sin = rotary(hidden_1lH, ids) if kind is None else rotary(hidden_1lH, ids, kind)
        return cos[:, :-1], sin[:, :-1]
