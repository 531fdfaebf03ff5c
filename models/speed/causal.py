"""Compute causal attention in bfloat16 on a CPU with blockwise matrix products.

torch's fused CPU kernel is much slower than its bfloat16 products. Each block needs two products:
scores and values. With 125-token rows a target pass takes 0.87 times as long, with 250 tokens 0.77
times, with 500 tokens 0.66 times.
"""

# B batch, T positions, N query heads, J key heads, G query heads per key head, D head size,
# R rows in a block, C columns up to a block's last row

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..transformer.layers import document_slices
from . import cpu
from .attending import attending_by, masked

BLOCK_ROWS = 128
"""Query rows per block; 64 and 256 made a 250-token target pass 2 and 5 % slower."""


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True for bfloat16 on a CPU with native bfloat16 products."""
    is_native = cpu.is_cpu(device) and torch.cpu._is_avx512_bf16_supported()
    return is_native and dtype == torch.bfloat16


def multiplying(
    device: torch.device, lengths: Sequence[int] | None
) -> AbstractContextManager[None]:
    """Run transformers' unmasked causal attention on bfloat16 products inside this context.

    Without bfloat16 autocast, or without native products, it changes nothing.

    Args:
        lengths: document lengths in a packed row. Each document then sees only itself.
    """
    is_autocast = torch.is_autocast_enabled("cpu")
    if not is_autocast or not multiplies(device, torch.get_autocast_dtype("cpu")):
        return nullcontext()

    def attend(
        query_BNTD: Tensor,
        keys_BJTD: Tensor,
        values_BJTD: Tensor,
        mask: Tensor | None,
        scale: float | None = None,
    ) -> Tensor:
        if mask is not None:
            return masked(query_BNTD, keys_BJTD, values_BJTD, mask, scale)
        query, keys, values = (x.to(torch.bfloat16) for x in (query_BNTD, keys_BJTD, values_BJTD))
        documents = [slice(None)] if lengths is None else document_slices(lengths)
        outs = [
            causal(query[:, :, rows], keys[:, :, rows], values[:, :, rows], scale)
            for rows in documents
        ]
        return torch.cat(outs, 2)

    return attending_by(attend)


def causal(
    query_BNTD: Tensor, keys_BJTD: Tensor, values_BJTD: Tensor, scale: float | None = None
) -> Tensor:
    """Return causal attention [B, N, T, D] in the inputs' dtype. N may be a multiple of J.

    Scores and probabilities are rounded to this dtype, as in torch's unfused attention.
    """
    T, outs, by_head = query_BNTD.shape[2], [], (query_BNTD.shape[1] // keys_BJTD.shape[1], -1)
    # No row sees the padding, because it is in the future.
    query_BNTD, keys_BJTD, values_BJTD = (
        cpu.padded(x, 2) for x in (query_BNTD, keys_BJTD, values_BJTD)
    )
    for rows, scores_BJRC in _blocks(query_BNTD, keys_BJTD, scale):
        out_BJRD = scores_BJRC.softmax(-1) @ values_BJTD[:, :, : rows.stop]
        outs.append(out_BJRD.unflatten(2, by_head))
    return torch.cat(outs, 3).flatten(1, 2)[:, :, :T]


def _blocks(
    query_BNTD: Tensor, keys_BJTD: Tensor, scale: float | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield position blocks with their scores [B, J, G R, C].

    A key head's query heads become rows in one product. Future positions get the score -inf.
    """
    T, J = query_BNTD.shape[2], keys_BJTD.shape[1]
    scale = query_BNTD.shape[-1] ** -0.5 if scale is None else scale
    query_BJGTD = (query_BNTD * scale).unflatten(1, (J, -1))
    for start in range(0, T, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, T)
        query_BJRD = query_BJGTD[:, :, :, start:stop].flatten(2, 3)
        scores_BJRC = query_BJRD @ keys_BJTD[:, :, :stop].mT
        own_BJGRR = scores_BJRC.unflatten(2, (-1, stop - start))[..., start:]
        own_BJGRR += own_BJGRR.new_full((stop - start,) * 2, -torch.inf).triu(1)
        yield slice(start, stop), scores_BJRC
