"""Divergence between the target's and the draft's next-token distributions, in bounded memory.

M supervised rows, L teacher rows, C rows of either kind in one chunk, H hidden size of the matrix
at hand, V target vocabulary, U draft vocabulary (U = V without one)

Logits exist for one chunk of rows at a time. The loss gradient for the logits has a closed form. So
the forward pass already computes the gradients of its inputs and drops the logits. Backward only
scales these gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..models.speed import cpu
from .methods import Divergence, LossKind

PLAIN_LOSS = LossKind()
SOFT_LABELS = ("kl", "lk_hybrid", "ce", "ce_l1", "topk_kl")
"""Losses with labels l, a distribution: their gradient for the draft's logits contains q - l."""
CHUNK_BYTES = 1 << 30
"""Chunk size in bytes of logits over the target's vocabulary; three such tensors exist at once.

Every chunk reads and writes the head's gradient. On a GPU, with 1,081 rows per chunk over 248,320
tokens, this takes a quarter of the products' time; with MAX_ROWS rows it takes half as much.
"""
MAX_ROWS = 2048


@dataclass(frozen=True)
class DistillationLoss:
    """Loss as a sum over rows, so that micro-batches and processes add up, and metrics per row."""

    loss: Tensor
    """Weighted sum of the divergence; differentiable once."""
    divergence_M: Tensor
    """Divergence per row, without its weight."""
    acceptance_M: Tensor
    """sum_v min(p_v, q_v) per row, with the target's p over its whole vocabulary."""
    agreement_M: Tensor
    """1 if target and draft agree on the most likely token, else 0."""
    mass_outside_M: Tensor
    """Target probability outside the draft vocabulary."""

    def sums(self) -> dict[str, Tensor]:
        """Return the metrics summed over rows. The training loop adds these sums up."""
        return {
            "acceptance": self.acceptance_M.sum(),
            "agreement": self.agreement_M.sum(),
            "mass_outside": self.mass_outside_M.sum(),
        }


def chunked_distillation(
    hidden_MH: Tensor,
    head_weight_UH: Tensor,
    teacher_hidden_LH: Tensor,
    teacher_head_VH: Tensor,
    *,
    pair_weight_UR: Tensor | None = None,
    measure: LossKind = PLAIN_LOSS,
    teacher_index_M: Tensor | None = None,
    teacher_rows_U: Tensor | None = None,
    weights_M: Tensor | None = None,
    chunk_rows: int | None = None,
) -> DistillationLoss:
    """Distill the target's distribution p into the draft's q, summed over rows.

    p = softmax(teacher_hidden teacher_head^T), q = softmax(hidden head^T), temperature 1. With a
    draft vocabulary, p' is p restricted to it and renormalized. Otherwise p' = p. The acceptance
    rate a = sum_v min(p, q) has p over the target's whole vocabulary, so tokens the draft lacks are
    lost.
      kl         sum_v p' (log p' - log q)      SPD (arXiv:2605.30852)
      tv         1 - a                          Leviathan et al. 2023 (arXiv:2211.17192), Th. 3.5
      lk         -log a                         LK losses (arXiv:2602.23881): a is its alpha
      lk_hybrid  w kl + (1 - w) tv              same paper: w = exp(-eta a), a constant, its lambda
      ce         -log q                         at the most likely token of p'
      ce_l1      c ce + (1 - c) sum_v |p - q|   DSpark (arXiv:2607.05147): c is ``ce_share``
      rkl        sum_v q (log q - log p')
      jsd        (KL(p' || m) + KL(q || m)) / 2, m = (p' + q) / 2
      topk_kl    kl with p' restricted to its top_k most likely tokens and renormalized
    Deviation: SpecForge computes w from a batch's mean a. Here each row has its own w, as in
    speculators.

    Products use the inputs' dtype, or autocast's if enabled. Everything else is in float32, or in
    float64 for float64 inputs. The head's gradient is summed in this precision, too, and rounded to
    the head's dtype once, at the end. Under autocast on a CPU each chunk's part is rounded to
    autocast's dtype first, as torch's own backward does. The largest tensors are three
    [chunk_rows, V] in float32 and the [U, H] gradient (none for a frozen head).

    Args:
        hidden_MH: input to the draft's head; supervised rows only.
        head_weight_UH: the draft's head.
        pair_weight_UR: second head. It reads the columns of ``hidden`` after the first H, and its
            logits are added to the first head's.
        teacher_hidden_LH: input to the target's head; its H may differ.
        teacher_head_VH: the target's head; no gradient.
        teacher_index_M: teacher row for each row of hidden, ascending, on the host. Rows with the
            same teacher row share its softmax. None: row i has teacher row i, L = M.
        teacher_rows_U: target id for every draft token, without repeats. It is needed if U < V.
        weights_M: factor for each row in the loss; metrics are not weighted.
        chunk_rows: rows at a time, by default as many as fit CHUNK_BYTES or a processor's caches.
            The number changes the result only by rounding.

    Raises:
        ValueError: unknown kind, or mismatched shapes.
    """
    teacher = (teacher_hidden_LH.detach(), teacher_head_VH.detach())
    _check(hidden_MH, head_weight_UH, teacher, measure.kind, teacher_index_M, teacher_rows_U)
    loss, rows_4M = _Distillation.apply(
        hidden_MH,
        (*teacher, teacher_index_M, teacher_rows_U),
        (measure, weights_M, chunk_rows, torch.is_grad_enabled()),
        head_weight_UH,
        *([] if pair_weight_UR is None else [pair_weight_UR]),
    )
    return DistillationLoss(loss, *rows_4M)


def _check(hidden_MH, head_weight_UH, teacher, kind, index_M, rows_U) -> None:
    teacher_hidden_LH, teacher_head_VH = teacher
    M, L = len(hidden_MH), len(teacher_hidden_LH)
    if kind not in get_args(Divergence):
        raise ValueError(f"kind: {kind!r} is no divergence; choose from {get_args(Divergence)}")
    if index_M is None and M != L:
        raise ValueError(
            f"teacher_hidden: {L} rows for {M} rows of hidden; select the same positions from "
            "both, or pass teacher_index"
        )
    if index_M is not None and (len(index_M) != M or bool((index_M.diff() < 0).any())):
        raise ValueError(
            f"teacher_index: {len(index_M)} entries for {M} rows of hidden, which must ascend; "
            "sort the rows of hidden by their teacher"
        )
    U, expected = len(head_weight_UH), len(teacher_head_VH if rows_U is None else rows_U)
    if expected != U:
        raise ValueError(
            f"head_weight: {U} tokens against {expected} of the target; "
            "pass teacher_rows with the target id of every draft token"
        )


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MH, teacher, options, *head_weights):
        measure, weights_M, chunk_rows, differentiable = options
        *teacher, index_M, rows_U = teacher
        x_MH, teacher_x_LH, teacher_head_VH, *heads = _for_products(
            hidden_MH, *teacher, *head_weights
        )
        # Every head has its own columns; a single head, the usual case, has all.
        widths = [head.shape[1] for head in heads]
        # Products use the inputs' dtype; sums and comparisons use at least float32.
        M, L = len(hidden_MH), len(teacher_x_LH)
        exact = torch.promote_types(hidden_MH.dtype, torch.float32)
        needs_hidden, _, _, *needs_heads = (differentiable and x for x in ctx.needs_input_grad)
        dhidden_MH = torch.empty_like(hidden_MH) if needs_hidden else None
        dheads = [
            torch.zeros_like(head, dtype=exact) if needed else None
            for head, needed in zip(head_weights, needs_heads, strict=True)
        ]
        if chunk_rows is None:
            most = cpu.chunk_bytes(CHUNK_BYTES, hidden_MH.device)
            fitting = most // (exact.itemsize * len(teacher_head_VH))
            chunk_rows = min(max(1, fitting), MAX_ROWS)
        if weights_M is None:
            weights_M = hidden_MH.new_ones(M, dtype=exact)
        # A copy, because the loop sets the weights of dropped rows to zero.
        weights_M = weights_M.to(exact, copy=True)
        target_3L = hidden_MH.new_zeros(3, L, dtype=exact)
        draft_3M = hidden_MH.new_zeros(3, M, dtype=exact)
        chunks = _chunks(M, L, index_M, chunk_rows)
        # Autocast's gradients of weights are rounded anyway.
        is_rounded = not x_MH.is_cuda and heads[0].dtype != head_weights[0].dtype
        if index_M is not None:
            index_M = index_M.to(hidden_MH.device, non_blocking=True)
        for first, stop, blocks in chunks:
            # Teacher distribution once, for every draft row compared with it.
            logits_CV = _logits(teacher_x_LH[first:stop], teacher_head_VH, exact)
            p_CU, target_3L[:, first:stop] = _restrict(logits_CV, rows_U)
            for rows in blocks:
                parts = x_MH[rows].split(widths, 1)
                logits = (_logits(x, head, exact) for x, head in zip(parts, heads, strict=True))
                chosen = rows if index_M is None else index_M[rows]
                dlogits_CU, draft_3M[:, rows] = _compare(
                    reduce(Tensor.add_, logits),
                    _take(p_CU, chosen, first),
                    target_3L[:, chosen],
                    rows_U,
                    measure,
                    x_MH.dtype,
                )
                if measure.drops_outside and rows_U is not None:
                    weights_M[rows] *= torch.isin(target_3L[2, chosen], rows_U.to(exact))
                dlogits_CU = cpu.padded(dlogits_CU)
                # Multiply out at once: backward then needs no logits, only a factor.
                if needs_hidden:
                    dparts = [F.linear(dlogits_CU, head.t()) for head in heads]
                    dx_CH = dparts[0] if len(dparts) == 1 else torch.cat(dparts, 1)
                    dhidden_MH[rows] = dx_CH[: rows.stop - rows.start] * weights_M[rows, None]
                for x, dhead_UH in zip(parts, dheads, strict=True):
                    if dhead_UH is not None:
                        # Weight the [C, H] factor, not the gradient [C, U]: it is smaller.
                        x = (x * weights_M[rows, None]).to(x.dtype)
                        add = _add_rounded if is_rounded else _add_product
                        add(dhead_UH, dlogits_CU.t(), cpu.padded(x))
        ctx.gradients = dhidden_MH, *dheads
        rows_4M = _rates(target_3L if index_M is None else target_3L[:, index_M], draft_3M)
        ctx.mark_non_differentiable(rows_4M)
        return (rows_4M[0] * weights_M).sum(), rows_4M

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        """Scale the stored gradients in place and return them. A second call is an error."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were already handed to a backward")
        gradients, ctx.gradients = ctx.gradients, None
        dhidden, *dheads = (x if x is None else x.mul_(grad_loss) for x in gradients)
        return dhidden, None, None, *dheads


def _for_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device_type)) for x in tensors)


def _logits(x_CH: Tensor, head_VH: Tensor, exact: torch.dtype) -> Tensor:
    """Return logits in dtype ``exact``. A GPU also accumulates in ``exact``, without rounding."""
    if x_CH.is_cuda and x_CH.dtype != exact:
        return torch.mm(x_CH, head_VH.t(), out_dtype=exact)
    return cpu.linear(x_CH, head_VH).to(exact)


def _add_product(total_UH: Tensor, left_UC: Tensor, right_CH: Tensor) -> None:
    """Add ``left @ right`` to ``total`` without rounding the product to its factors' dtype."""
    exact = total_UH.dtype
    if total_UH.is_cuda and left_UC.dtype != exact:
        torch.addmm(total_UH, left_UC, right_CH, out_dtype=exact, out=total_UH)
    else:
        total_UH.addmm_(left_UC.to(exact), right_CH.to(exact))


def _add_rounded(total_UH: Tensor, left_UC: Tensor, right_CH: Tensor) -> None:
    """Add ``left @ right``, rounded to its factors' dtype: a quarter of the time on a CPU."""
    total_UH.add_(left_UC @ right_CH)


def _chunks(
    M: int, L: int, index_M: Tensor | None, size: int
) -> Iterator[tuple[int, int, list[slice]]]:
    """Yield each chunk's teacher rows (first, stop) and its blocks of draft rows."""
    stops = list(range(size, L, size)) + [L]
    ends = stops
    if index_M is not None:
        ends = torch.searchsorted(index_M, torch.tensor(stops)).tolist()
    # Draft rows ascend by teacher row, so each chunk has one run of them.
    first = start = 0
    for stop, end in zip(stops, ends, strict=True):
        yield first, stop, [slice(i, min(i + size, end)) for i in range(start, end, size)]
        first, start = stop, end


def _take(p_CU: Tensor, rows: slice | Tensor, first: int) -> Tensor:
    """Return the given teacher rows of a chunk p_CU that begins at teacher row ``first``."""
    if isinstance(rows, slice):
        return p_CU[rows.start - first : rows.stop - first]
    return p_CU.index_select(0, rows - first)


def _restrict(logits_CV: Tensor, rows_U: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the target's distribution over the draft vocabulary, and overwrite the logits.

    Returns:
        p_CU, renormalized.
        target_3C: sum_u p log p, draft-vocabulary probability, and most likely token in the whole
            vocabulary (ids are exact in float32).
    """
    p_CU, log_z_C, top_C = _softmax(logits_CV)
    logits_CU, inside_C = logits_CV, torch.ones_like(log_z_C)
    # Tokens the draft lacks count against it: the most likely token may be outside.
    if rows_U is not None:
        whole_log_z_C, logits_CU = log_z_C, logits_CV.index_select(-1, rows_U)
        p_CU, log_z_C, _ = _softmax(logits_CU)
        # A ratio of two normalizers; rounding may leave it above 1.
        inside_C = (log_z_C - whole_log_z_C).exp_().clamp_max_(1)
    # log p = logit - log Z, so log p itself is never stored.
    negentropy_C = logits_CU.mul_(p_CU).sum(-1) - log_z_C
    return p_CU, torch.stack([negentropy_C, inside_C, top_C.to(log_z_C.dtype)])


def _compare(
    draft_CU: Tensor,
    p_CU: Tensor,
    target_3C: Tensor,
    rows_U: Tensor | None,
    measure: LossKind,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the loss gradient with respect to the draft's logits, and overwrite the logits.

    For losses with labels l, the gradient is q - l. For tv it is q (q . m - m), with m = [q < p].
    For lk it is tv's gradient / a. For rkl and jsd it is q (g - q . g), where g is the gradient
    with respect to q. lk_hybrid and ce_l1 mix two of these.

    Args:
        target_3C: from ``_restrict``.
        dtype: dtype of the gradient.

    Returns:
        gradient_CU.
        draft_3C: loss, sum_u min(p, q) with p over the whole vocabulary, and the draft's most
            likely token as a target id.
    """
    kind, (negentropy_C, inside_C, _) = measure.kind, target_3C
    q_CU, log_z_C, top_C = _softmax(draft_CU)
    # Labels: the teacher's distribution, or only its most likely tokens.
    labels_CU = p_CU
    if kind in ("ce", "ce_l1", "topk_kl"):
        count = measure.top_k if kind == "topk_kl" else 1
        labels_CU, negentropy_C = _most_likely(p_CU, count)
    # Use the logits first: later results take their memory.
    if kind in SOFT_LABELS:
        # log q itself is never stored, only its sum with the labels.
        divergence_C = negentropy_C + log_z_C - draft_CU.mul_(labels_CU).sum(-1)
    elif kind in ("rkl", "jsd"):
        # The slope's mean under q is the loss (jsd: plus a rest); subtract it for the gradient.
        log_q_CU, log_p_CU = draft_CU.sub_(log_z_C[:, None]), _above_zero(p_CU).log()
        if kind == "jsd":
            log_m_CU = _above_zero((p_CU + q_CU) / 2).log()
            slope_CU, rest_C = (log_q_CU - log_m_CU) / 2, (p_CU * (log_p_CU - log_m_CU)).sum(-1) / 2
        else:
            slope_CU, rest_C = log_q_CU - log_p_CU, torch.zeros_like(log_z_C)
        mean_C = (q_CU * slope_CU).sum(-1)
        gradient_CU, loss_C = slope_CU.sub_(mean_C[:, None]).mul_(q_CU), mean_C + rest_C
    # Acceptance uses the whole vocabulary: tokens the draft lacks are never accepted.
    whole_CU = p_CU if rows_U is None else p_CU * inside_C[:, None]
    overlap_C = torch.minimum(whole_CU, q_CU, out=draft_CU).sum(-1)
    if kind in ("tv", "lk", "lk_hybrid", "ce_l1"):
        loss_C, gradient_CU = 1 - overlap_C, torch.lt(q_CU, whole_CU, out=draft_CU).mul_(q_CU)
        # Tokens with q < p gain from a larger q; the others pay for it.
        capped_C1 = gradient_CU.sum(-1, keepdim=True)
        gradient_CU.neg_().addcmul_(q_CU, capped_C1)
        if kind == "lk":
            loss_C = -_above_zero(overlap_C).log()
            gradient_CU /= _above_zero(overlap_C)[:, None]
        elif kind == "lk_hybrid":
            share_C = (-measure.eta * overlap_C).exp()
            loss_C = share_C * divergence_C + (1 - share_C) * loss_C
            gradient_CU.lerp_(q_CU - p_CU, share_C[:, None])
        elif kind == "ce_l1":  # the distance is 2 tv
            loss_C = measure.ce_share * divergence_C + (1 - measure.ce_share) * 2 * loss_C
            gradient_CU.mul_(2).lerp_(q_CU - labels_CU, measure.ce_share)
    elif kind in SOFT_LABELS:
        gradient_CU, loss_C = torch.empty_like(q_CU, dtype=dtype), divergence_C
        torch.sub(q_CU, labels_CU, out=gradient_CU)
    # Agreement compares ids in the target's vocabulary.
    top_C = top_C if rows_U is None else rows_U[top_C]
    return gradient_CU.to(dtype), torch.stack([loss_C, overlap_C, top_C.to(log_z_C.dtype)])


def _most_likely(p_CU: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return renormalized p over the most likely tokens, and its sum_u p log p."""
    best_CK, index_CK = p_CU.topk(min(count, p_CU.shape[-1]))
    best_CK /= best_CK.sum(-1, keepdim=True)
    # xlogy takes 0 log 0 as 0, where a probability has underflowed.
    negentropy_C = torch.xlogy(best_CK, best_CK).sum(-1)
    return torch.zeros_like(p_CU).scatter_(-1, index_CK, best_CK), negentropy_C


def _rates(target_3M: Tensor, draft_3M: Tensor) -> Tensor:
    """Stack loss, acceptance, agreement, and mass outside the draft vocabulary into [4, M]."""
    _, inside_M, target_top_M = target_3M
    loss_M, accepted_M, top_M = draft_3M
    agreed_M = (top_M == target_top_M).to(loss_M.dtype)
    return torch.stack([loss_M, accepted_M, agreed_M, 1 - inside_M])


def _above_zero(x: Tensor) -> Tensor:
    """Clamp above 0. If an overlap rounds to 0, lk is then large and has no gradient."""
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _softmax(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, log normalizers and argmax. The log normalizers need no second exp."""
    top_C = cpu.argmax(logits_CV)
    probs_CV, top_C1 = logits_CV.softmax(-1), top_C[:, None]
    # The largest probability is at least 1 / V, so its log is finite.
    log_normalizer_C1 = logits_CV.gather(-1, top_C1) - probs_CV.gather(-1, top_C1).log_()
    return probs_CV, log_normalizer_C1[:, 0], top_C
