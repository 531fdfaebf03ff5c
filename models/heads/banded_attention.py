"""Compute exact attention, causal in one key block and diagonal in others, without masks.

B batch, S query sequences, N query heads, J key heads, G query heads per key head (N = J G),
T positions, D head size, W diagonals

A diagonal gives each query one key, at a fixed distance before the query. Diagonals are computed
elementwise, and the causal part in a fused kernel. The log-sum-exps merge both parts. No mask or
score matrix is ever stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transformer.layers import document_slices, positions_of

aten = torch.ops.aten  # F.scaled_dot_product_attention returns no log-sum-exp
EVERY = slice(None)
SHORT_ROWS = 512
"""Rows up to which a CPU attends in float32: as fast, and oneDNN prepares no program per length."""


class Place(NamedTuple):
    """Location of some examples in a tensor [B, heads, T, D]."""

    examples: slice
    positions: slice = EVERY


@dataclass(frozen=True)
class Band:
    """Keys visible to the queries of adjacent examples, as a causal part and diagonals."""

    query: Place
    blocks: Place
    """Location of the keys and values in every key block."""
    diagonals: tuple[tuple[int, int], ...]
    """(block, distance): the query at position t sees position t - distance, if it exists."""
    causal: tuple[int, int]
    """(block, distance): the query sees every position up to t - distance."""
    lengths: tuple[int, ...] | None = None
    """Document lengths along the positions; t counts from the start of each document."""


def banded_attention(
    bands: Sequence[Band], query_SNTD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Tensor:
    """Compute softmax attention from every query to the keys in its band.

    The fastest memory order is rows [S, T, heads, D] for queries and [B, T, J, D] for each block,
    as a matrix product writes them. Pass transposed views of these rows. Other strides with a
    contiguous last axis are used without a copy. Results and gradients are returned in the fastest
    order. Under autocast all inputs are cast to its dtype. CUDA needs float16 or bfloat16.

    Args:
        query_SNTD: query head h uses key head h // (N // J).
        keys: tensors [R, B, J, T, D] with R blocks, or [B_r, J, T_r, D] with one block for the
            first B_r examples or T_r positions. Blocks are numbered in this order.
        values: like keys.

    Returns:
        out_SNTD; rows outside every band are zeros without gradient.

    Raises:
        ValueError: heads or dtype do not match.
    """
    N, J = query_SNTD.shape[1], keys[0].shape[-3]
    if N % J:
        raise ValueError(f"query: {N} heads cannot share {J} key heads; use a multiple of {J}")
    inputs = [query_SNTD, *keys, *values]
    device_type = query_SNTD.device.type
    if torch.is_autocast_enabled(device_type):
        inputs = [x.to(torch.get_autocast_dtype(device_type)) for x in inputs]
    if device_type == "cuda" and inputs[0].dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"query: dtype {inputs[0].dtype} has no fused attention on CUDA; "
            "run under torch.autocast or pass bfloat16"
        )
    return _BandedAttention.apply(bands, *inputs)


class _BandedAttention(torch.autograd.Function):
    """Autograd function that merges the diagonals with the fused causal part.

    With scores S, merged output O and merged log-sum-exp L, every probability is P = exp(S - L),
    and dS = P (dP - delta) with delta = rowsum(dO O). The fused backward computes exactly this from
    its arguments O and L, so its gradients are exact (as in ring attention, arXiv:2310.01889).
    Autograd cannot do this, because the fused op's log-sum-exp carries no gradient.
    """

    @staticmethod
    def forward(ctx, bands, *inputs):
        inputs = [_dense_rows(x) for x in inputs]
        S, N, T, D = inputs[0].shape
        # Diagonals are added one by one, and bfloat16 would round the sum each time.
        exact = torch.promote_types(inputs[0].dtype, torch.float32)
        out_STND = inputs[0].new_zeros(S, T, N, D, dtype=exact)
        lse_STN = inputs[0].new_zeros(S, T, N, dtype=exact)
        probs = [_attend(b, _select(inputs, b), out_STND[b.query], lse_STN[b.query]) for b in bands]
        out_SNTD = out_STND.to(inputs[0].dtype).transpose(1, 2)
        ctx.save_for_backward(out_SNTD, lse_STN, *probs, *inputs)
        ctx.bands = bands
        return out_SNTD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SNTD):
        out_SNTD, lse_STN, *saved = ctx.saved_tensors
        probs, inputs = saved[: len(ctx.bands)], saved[len(ctx.bands) :]
        grad_SNTD = _dense_rows(grad_SNTD)  # the gradient of a sum is expanded: stride 0
        # Bands share key blocks, so each adds to one set of gradients.
        gradients = [_zeros_by_row(x) for x in inputs]
        for b, probs_WBTN in zip(ctx.bands, probs, strict=True):
            rows = (_pick(grad_SNTD, b.query), _pick(out_SNTD, b.query), lse_STN[b.query])
            saved = (*rows, probs_WBTN)
            _attend_backward(b, _select(inputs, b), saved, _select(gradients, b))
        return None, *gradients


def _dense_rows(x: Tensor) -> Tensor:
    """Return ``x`` with a contiguous last axis, the only stride that fused kernels restrict."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _zeros_by_row(x: Tensor) -> Tensor:
    """Return zeros shaped as x [..., heads, T, D] in memory order [..., T, heads, D]."""
    return x.new_zeros(x.transpose(-3, -2).shape).transpose(-3, -2)


def _blocks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views [B_r, J, T, D] for all blocks."""
    return [block for x in tensors for block in (x.unbind(0) if x.ndim == 5 else (x,))]


Rows = tuple[Tensor, list[Tensor], list[Tensor]]
"""One band's tensors: query [B, N, T, D], and for each block keys and values [B, J, T, D]."""


def _select(tensors: Sequence[Tensor], band: Band) -> Rows:
    """Return the band's part of (query, *keys, *values), or of their gradients."""
    query_SNTD, *rest = tensors
    keys, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    keys, values = (
        [_pick(block, band.blocks) for block in _blocks(part)] for part in (keys, values)
    )
    return _pick(query_SNTD, band.query), keys, values


def _pick(x_BNTD: Tensor, place: Place) -> Tensor:
    return x_BNTD[place.examples, :, place.positions]


def _documents(band: Band, T: int) -> list[slice]:
    return document_slices((T,) if band.lengths is None else band.lengths)


def _query_rows(x_BNTD: Tensor, J: int) -> Tensor:
    """Return a view [B, T, J, G, D], to which key rows [B, T, J, 1, D] broadcast."""
    return x_BNTD.transpose(1, 2).unflatten(2, (J, -1))


def _key_rows(x_BJTD: Tensor) -> Tensor:
    return x_BJTD.transpose(1, 2).unsqueeze(3)


def _attend(band: Band, inputs: Rows, out_BTND: Tensor, lse_BTN: Tensor) -> Tensor:
    """Fill ``out_BTND`` and ``lse_BTN``, and return the diagonals' probabilities [W, B, T, N].

    Both outputs must be zero on entry. Diagonals are computed one at a time, because at T = 2048
    and N D = 256 the product of one diagonal stays in the last-level cache. Chunks of T (64 to
    512), or one strided view of all diagonals, were no faster.
    """
    query_BNTD, keys, values = inputs
    r, first = band.causal
    W, J = len(band.diagonals), keys[r].shape[1]
    T, scale = query_BNTD.shape[2], query_BNTD.shape[3] ** -0.5
    # Rows nearer than ``first`` to their document's start have no causal part: weight 0.
    for document in _documents(band, T):
        far = slice(document.start + first, document.stop)
        seen = slice(document.start, document.stop - first)
        lse_BTN[:, document.start : min(far.start, document.stop)] = -torch.inf
        if far.start < far.stop:
            key_BJMD, value_BJMD = (x[r][:, :, seen] for x in (keys, values))
            fused = _fused_forward(query_BNTD[:, :, far], key_BJMD, value_BJMD, scale)
            out_BTND[:, far] = fused[0].transpose(1, 2)
            lse_BTN[:, far] = fused[1].transpose(1, 2)

    # Diagonal scores; outside the document they stay -inf.
    probs_WBTN = out_BTND.new_full((W, *lse_BTN.shape), -torch.inf)
    if not W:
        return probs_WBTN
    q_BTJGD = _query_rows(query_BNTD, J).to(out_BTND.dtype)
    # One product buffer for all diagonals: it stays in the cache.
    room, probs_WBTJG = q_BTJGD.new_empty(q_BTJGD.numel()), probs_WBTN.unflatten(3, (J, -1))
    diagonals = [(w, r, d) for w, (r, d) in enumerate(band.diagonals) if d < T]
    for w, r, d in diagonals:
        key_BTJ1D = _key_rows(keys[r][:, :, : T - d])
        probs_WBTJG[w, :, d:] = _product(q_BTJGD[:, d:], key_BTJ1D, room).sum(-1)
    probs_WBTN *= scale
    _hide_other_documents(band, probs_WBTN)
    # Both parts were normalized separately: scale each to the log-sum-exp of all scores.
    merged_BTN = torch.logaddexp(lse_BTN, probs_WBTN.logsumexp(0))
    out_BTND *= (lse_BTN - merged_BTN).exp_()[..., None]
    probs_WBTN.sub_(merged_BTN).exp_()
    lse_BTN.copy_(merged_BTN)
    # A diagonal's value row is seen by one query: no matrix product, no mask.
    out_BTJGD = out_BTND.unflatten(2, (J, -1))
    for w, r, d in diagonals:
        value_BTJ1D = _key_rows(values[r][:, :, : T - d])
        out_BTJGD[:, d:].addcmul_(probs_WBTJG[w, :, d:, :, :, None], value_BTJ1D)
    return probs_WBTN


def _product(rows: Tensor, others: Tensor, room: Tensor) -> Tensor:
    """Multiply into the front of ``room``, because torch.compile needs an ``out`` without gaps."""
    return torch.mul(rows, others, out=room[: rows.numel()].view(rows.shape))


def _hide_other_documents(band: Band, scores_WBTN: Tensor) -> None:
    """Hide diagonal scores where the key would belong to the previous document."""
    if band.lengths is None or len(band.lengths) == 1:
        return
    device = scores_WBTN.device
    position_T = positions_of(scores_WBTN.shape[2], band.lengths, device)
    distance_W = torch.tensor([distance for _, distance in band.diagonals], device=device)
    outside_WT = position_T < distance_W[:, None]
    scores_WBTN.masked_fill_(outside_WT[:, None, :, None], -torch.inf)


def _attend_backward(
    band: Band,
    inputs: Rows,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    gradients: Rows,
) -> None:
    """Add the band's gradients to ``gradients``, because several diagonals may share a block."""
    query_BNTD, keys, values = inputs
    grad_BNTD, out_BNTD, lse_BTN, probs_WBTN = saved
    dquery_BNTD, dkeys, dvalues = gradients
    r, first = band.causal
    J, T, scale = keys[r].shape[1], query_BNTD.shape[2], query_BNTD.shape[3] ** -0.5
    # Causal part: with the merged output and log-sum-exp, the kernel's P and delta are exact.
    for document in _documents(band, T):
        far = slice(document.start + first, document.stop)
        seen = slice(document.start, document.stop - first)
        if far.start >= far.stop:
            continue
        key, value, dkey, dvalue = (x[r][:, :, seen] for x in (keys, values, dkeys, dvalues))
        fused = _fused_backward(
            grad_BNTD[:, :, far],
            (query_BNTD[:, :, far], key, value),
            out_BNTD[:, :, far],
            lse_BTN[:, far].transpose(1, 2),
            scale,
        )
        dquery_BNTD[:, :, far] += fused[0]
        dkey += fused[1]
        dvalue += fused[2]
    if not band.diagonals:
        return
    # delta = rowsum(dO O), once for all diagonals; its product buffer is reused below.
    q_BTJGD, grad_BTJGD, out_BTJGD = (_query_rows(x, J) for x in (query_BNTD, grad_BNTD, out_BNTD))
    grad_BTJGD = grad_BTJGD.to(probs_WBTN.dtype)
    dq_BTJGD = torch.zeros_like(grad_BTJGD)
    room = grad_BTJGD.new_empty(grad_BTJGD.numel())
    delta_BTJG = _product(grad_BTJGD, out_BTJGD, room).sum(-1)
    for w, (r, d) in enumerate(band.diagonals):
        if d >= T:
            continue
        key, value, dkey, dvalue = (
            _key_rows(x[r][:, :, : T - d]) for x in (keys, values, dkeys, dvalues)
        )
        grad, probs = grad_BTJGD[:, d:], probs_WBTN.unflatten(3, (J, -1))[w, :, d:]
        products = _product(grad, value, room)
        # dS = P (dP - delta), and from it the gradients for query, key and value.
        dscores = products.sum(-1).sub_(delta_BTJG[:, d:]).mul_(probs).mul_(scale)
        dq_BTJGD[:, d:].addcmul_(dscores[..., None], key)
        # A group's G heads share a key row, and addcmul_ does not sum over a broadcast axis.
        for g in range(q_BTJGD.shape[3]):
            one = slice(g, g + 1)
            dkey.addcmul_(dscores[..., one, None], q_BTJGD[:, d:, :, one])
            dvalue.addcmul_(probs[..., one, None], grad[..., one, :])
    dquery_BNTD += dq_BTJGD.flatten(2, 3).transpose(1, 2)


def _product_dtype(x_BNMD: Tensor) -> Tensor:
    is_short = not x_BNMD.is_cuda and x_BNMD.shape[2] <= SHORT_ROWS
    return x_BNMD.float() if is_short and x_BNMD.dtype == torch.bfloat16 else x_BNMD


def _fused_forward(
    query_BNMD: Tensor, key_BJMD: Tensor, value_BJMD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return causal attention and its natural log-sum-exp [B, N, M], without copied key heads."""
    query_BNMD, key_BJMD, value_BJMD = map(_product_dtype, (query_BNMD, key_BJMD, value_BJMD))
    attend = (
        aten._scaled_dot_product_flash_attention
        if query_BNMD.is_cuda
        else aten._scaled_dot_product_flash_attention_for_cpu
    )
    return attend(query_BNMD, key_BJMD, value_BJMD, 0.0, True, scale=scale)[:2]


def _fused_backward(
    grad_BNMD: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out_BNMD: Tensor,
    lse_BNM: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not grad_BNMD.is_cuda:
        rows = map(_product_dtype, (grad_BNMD, *inputs, out_BNMD))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse_BNM, 0.0, True, scale=scale
        )
    M = grad_BNMD.shape[2]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_BNMD.device)
    return aten._scaled_dot_product_flash_attention_backward(
        grad_BNMD,
        *inputs,
        out_BNMD,
        lse_BNM.contiguous(),
        None,
        None,
        M,
        M,
        0.0,
        True,
        no_dropout,
        no_dropout[:0],
        scale=scale,
    )


# -- training-time test -----------------------------------------------------------------------

# B batch, T rows, N query heads, J key heads, D head size


def ttt_attention(
    query_BNTD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int] | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute attention in step i, the last of the i + 1 steps in ``keys``.

    out_t = softmax over {K_0[T'] : T' <= t} and {K_j[t] : 1 <= j <= i}

    This is EAGLE-3 (arXiv:2503.01840), Section 3.2: causal attention plus i diagonals at distance
    0. Row t in step i has drafted i tokens after position t. It sees target-feature rows up to t,
    and only its own drafted rows. For memory order and dtypes see `banded_attention`.

    Args:
        keys: one tensor [B, J, T, D] per step 0 .. i.
        lengths: document lengths in a packed row.
        window: positions that a row sees, its own included; None: all.

    Returns:
        out_BNTD.
    """
    longest = query_BNTD.shape[2] if lengths is None else max(lengths)
    if window is not None and window < longest + len(keys) - 1:
        return _windowed_attention(query_BNTD, keys, values, lengths, window)
    diagonals = tuple((step, 0) for step in range(1, len(keys)))
    documents = None if lengths is None else tuple(lengths)
    band = Band(Place(EVERY), Place(EVERY), diagonals, (0, 0), documents)
    return banded_attention([band], query_BNTD, keys, values)


def _windowed_attention(
    query_BNTD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int] | None,
    window: int,
) -> Tensor:
    """Compute ``ttt_attention`` with a sliding window, in chunks of max(window, 64) rows.

    Row t in step i has position t + i. It sees the rows (t + i - window, t] in step 0, and its own
    drafted rows in the last ``window`` steps.
    """
    B, J, T, D = keys[0].shape
    step, size = len(keys) - 1, max(window, 64)  # tiny chunks would only cost calls
    query_BJGTD = query_BNTD.unflatten(1, (J, -1)) * D**-0.5
    # Position 0 starts a document, so a running count numbers them.
    document_T = (positions_of(T, lengths, query_BNTD.device) == 0).cumsum(0)
    place_T = torch.arange(T, device=query_BNTD.device)
    drafted, outs = range(max(step - window, 0) + 1, step + 1), []  # older ones left the window
    for start in range(0, T, size):
        rows, seen = slice(start, start + size), slice(max(start + 1 - window, 0), start + size)
        query_BJGRD, distance = query_BJGTD[..., rows, :], place_T[rows, None] - place_T[seen]
        hidden_RS = (distance < 0) | (distance + step >= window)  # row t has position t + step
        hidden_RS |= document_T[rows, None] != document_T[seen]
        key_BJ1SD, value_BJ1SD = keys[0][:, :, None, seen], values[0][:, :, None, seen]
        scores = (query_BJGRD @ key_BJ1SD.mT).masked_fill(hidden_RS, -torch.inf)
        own = [(query_BJGRD * keys[j][:, :, None, rows]).sum(-1, keepdim=True) for j in drafted]
        # Sums over many keys lose probability mass in 16 bits.
        exact = torch.promote_types(scores.dtype, torch.float32)
        probs = torch.cat([scores, *own], -1).softmax(-1, dtype=exact).to(scores.dtype)
        probs_BJGRS, *own = probs.split([scores.shape[-1], *[1] * len(own)], -1)
        pairs = zip(own, drafted, strict=True)
        shares = [p * values[j][:, :, None, rows] for p, j in pairs]
        outs.append(sum(shares, start=probs_BJGRS @ value_BJ1SD))
    return torch.cat(outs, 3).flatten(1, 2)
