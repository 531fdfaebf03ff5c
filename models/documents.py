"""Documents packed into one row: positions restart in each, and attention stays inside it.

A packed row [1, T] holds documents one after the other, without padding; ``lengths`` are their
tokens. None in place of lengths, everywhere: every row of the batch is one text.
"""

# B batch, T positions, N query heads, J key heads, D head size

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def document_slices(lengths: Sequence[int]) -> list[slice]:
    """Where each document is in the row."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def positions_of(num_positions: int, lengths: Sequence[int] | None, device: Any) -> Tensor:
    """Position of every token in its own text: int64 [T]."""
    if lengths is None:
        return torch.arange(num_positions, device=device)
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def causal_attention(
    query_BTND: Tensor, keys_BTJD: Tensor, values_BTJD: Tensor, lengths: Sequence[int] | None = None
) -> Tensor:
    """Every row sees the rows of its text up to itself; heads may be grouped. No mask.

    Returns:
        [B, T, N, D].
    """
    inputs = [x.transpose(1, 2) for x in (query_BTND, keys_BTJD, values_BTJD)]
    options: dict[str, Any] = {"is_causal": True}
    options["enable_gqa"] = query_BTND.shape[2] != keys_BTJD.shape[2]
    attend: Any = F.scaled_dot_product_attention
    if lengths is None:
        attended_BNTD = attend(*inputs, **options)
    else:
        attended_BNTD = _attend_apart(attend, inputs, lengths, options)
    return attended_BNTD.transpose(1, 2)


class WithinDocuments(TorchFunctionMode):
    """``with WithinDocuments(lengths):`` attention of a packed row, in a transformers model too, is
    computed document by document: no pair of different ones, and no mask of the whole row.

    For the forward pass only: what recomputes a layer later does not find the mode active.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = lengths

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attend_apart(func, args, self.lengths, kwargs)


def _attend_apart(
    attend: Any, inputs: Sequence[Tensor], lengths: Sequence[int], options: dict[str, Any]
) -> Tensor:
    """
    Args:
        options: an ``attn_mask`` over the whole row (a sliding window's) is cut up as well.
    """
    mask, outs = options.pop("attn_mask", None), []
    parts = zip(*(x.split(list(lengths), 2) for x in inputs), strict=True)
    for part, rows in zip(parts, document_slices(lengths), strict=True):
        mask_of_part = None if mask is None else mask[..., rows, rows]
        outs.append(attend(*part, attn_mask=mask_of_part, **options))
    return torch.cat(outs, 2)


def packed_call(
    config: Any, input_ids_BT: Tensor, lengths: Sequence[int] | None
) -> tuple[dict[str, Tensor], AbstractContextManager]:
    """How to run a frozen transformers decoder on a packed row: more arguments, and a context.

    Positions that restart make transformers build a mask [T, T], which its sdpa kernels then
    compute in full. A padding mask without padding stops it, and the context does the work.
    """
    if lengths is None:
        return {}, nullcontext()
    positions_T = positions_of(input_ids_BT.shape[1], lengths, input_ids_BT.device)
    options = {"position_ids": positions_T[None]}
    if config._attn_implementation != "sdpa":
        return options, nullcontext()
    return {**options, "attention_mask": torch.ones_like(input_ids_BT)}, WithinDocuments(lengths)
