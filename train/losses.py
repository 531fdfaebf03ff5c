"""Divergence between the target's and the draft's next-token distributions, in bounded memory.

M counted rows, C rows of one chunk, H hidden size of the matrix at hand, V target vocabulary
U draft vocabulary (U = V without one)

Logits exist for one chunk of rows at a time. The gradient with respect to them is known in closed
form, so it is multiplied out in the forward pass and the logits are dropped: backward only scales.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipedraft.models.layers import linear

Divergence = Literal["kl", "tv", "lk"]


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """Sums over rows, so that micro-batches and ranks add up; divide by `count` at the end."""

    loss: Tensor
    """Weighted sum of the divergence; differentiable once."""
    acceptance_sum: Tensor
    """Sum over rows of sum_v min(p_v, q_v), with the target's p over its whole vocabulary."""
    agreement_sum: Tensor
    """Rows where target and draft have the same most likely token."""
    mass_outside_sum: Tensor
    """Target probability on tokens that the draft vocabulary lacks."""
    count: int
    """Rows M."""


def chunked_distillation(
    hidden_MH: Tensor,
    head_weight_UH: Tensor,
    teacher_hidden_MH: Tensor,
    teacher_head_VH: Tensor,
    *,
    kind: Divergence = "kl",
    teacher_rows_U: Tensor | None = None,
    weights_M: Tensor | None = None,
    chunk_rows: int = 256,
) -> DistillationLoss:
    """Distil the target's distribution p into the draft's q, summed over rows.

    p = softmax(teacher_hidden teacher_head^T), q = softmax(hidden head^T), temperature 1
    kl: sum_v p (log p - log q)                SPD (arXiv:2605.30852)
    tv: 1 - sum_v min(p, q)                    1 - the acceptance rate of Leviathan et al. 2023
    lk: -log sum_v min(p, q)                   (arXiv:2211.17192), Theorem 3.5, and its likelihood
    Deviation: with a draft vocabulary p is restricted to it and renormalised, in the loss only.

    Products run in the dtype of the inputs (autocast's, when enabled), everything else and the
    gradient of the head in float32 (float64 for float64 inputs). Largest memory: a few
    [chunk_rows, V] float32 tensors, and the [U, H] gradient of all rows and that of one chunk,
    which are skipped for a frozen head.

    Args:
        hidden_MH: what the draft's head is applied to; counted rows only.
        head_weight_UH: the draft's head.
        teacher_hidden_MH: what the target's head is applied to, of the same rows; its H may differ.
        teacher_head_VH: the target's head; no gradient.
        teacher_rows_U: target id of every draft token, without repeats; needed if U < V.
        weights_M: factor of each row in the loss; the metrics are not weighted.
        chunk_rows: rows at a time; the result does not depend on it beyond rounding.

    Raises:
        ValueError: unknown kind, or shapes that do not fit together.
    """
    _check(hidden_MH, head_weight_UH, teacher_hidden_MH, teacher_head_VH, kind, teacher_rows_U)
    loss, acceptance, agreement, outside = _Distillation.apply(
        hidden_MH,
        head_weight_UH,
        (teacher_hidden_MH.detach(), teacher_head_VH.detach(), teacher_rows_U),
        (kind, weights_M, chunk_rows, torch.is_grad_enabled()),
    )
    return DistillationLoss(
        loss=loss,
        acceptance_sum=acceptance,
        agreement_sum=agreement,
        mass_outside_sum=outside,
        count=len(hidden_MH),
    )


def _check(hidden_MH, head_weight_UH, teacher_hidden_MH, teacher_head_VH, kind, rows_U) -> None:
    if kind not in get_args(Divergence):
        raise ValueError(f"kind: {kind!r} is no divergence; choose from {get_args(Divergence)}")
    if len(hidden_MH) != len(teacher_hidden_MH):
        raise ValueError(
            f"teacher_hidden: {len(teacher_hidden_MH)} rows for {len(hidden_MH)} rows of hidden; "
            "select the same positions from both"
        )
    U, expected = len(head_weight_UH), len(teacher_head_VH if rows_U is None else rows_U)
    if expected != U:
        raise ValueError(
            f"head_weight: {U} tokens against {expected} of the target; "
            "pass teacher_rows with the target id of every draft token"
        )


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MH, head_weight_UH, teacher, options):
        kind, weights_M, chunk_rows, differentiable = options
        *teacher, rows_U = teacher
        x_MH, head_UH, teacher_x_MH, teacher_head_VH = _for_products(
            hidden_MH, head_weight_UH, *teacher
        )
        exact = torch.promote_types(hidden_MH.dtype, torch.float32)
        needs_hidden, needs_head = (differentiable and x for x in ctx.needs_input_grad[:2])
        needs_gradient = needs_hidden or needs_head
        dhidden_MH = torch.empty_like(hidden_MH) if needs_hidden else None
        dhead_UH = torch.zeros_like(head_weight_UH, dtype=exact) if needs_head else None
        head_UH = head_UH.detach().requires_grad_(needs_head)
        sums_4 = hidden_MH.new_zeros(4, dtype=exact)
        for start in range(0, len(hidden_MH), chunk_rows):
            rows = slice(start, start + chunk_rows)
            x_CH = x_MH[rows].detach().requires_grad_(needs_hidden)
            with torch.set_grad_enabled(needs_gradient):
                logits_CU = linear(x_CH, head_UH)
            chunk_sums_4, dlogits_CU = _distil_chunk(
                logits_CU.detach().to(exact),
                linear(teacher_x_MH[rows], teacher_head_VH).to(exact),
                rows_U,
                kind,
                None if weights_M is None else weights_M[rows, None].to(exact),
                needs_gradient,
            )
            sums_4 += chunk_sums_4
            if needs_gradient:
                wanted = [x for x in (x_CH, head_UH) if x.requires_grad]
                gradients = torch.autograd.grad(logits_CU, wanted, dlogits_CU.to(x_CH.dtype))
            if needs_hidden:
                dhidden_MH[rows] = gradients[0]
            if needs_head:
                dhead_UH += gradients[-1]
        ctx.gradients = dhidden_MH, dhead_UH
        loss, *metrics = (x.clone() for x in sums_4)
        ctx.mark_non_differentiable(*metrics)
        return loss, *metrics

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        """Scales in place and hands over: a second backward through one loss is an error."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were already handed to a backward")
        gradients, ctx.gradients = ctx.gradients, None
        return *(x if x is None else x.mul_(grad_loss) for x in gradients), None, None


def _for_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device_type)) for x in tensors)


def _distil_chunk(
    draft_CU: Tensor,
    target_CV: Tensor,
    rows_U: Tensor | None,
    kind: Divergence,
    weights_C1: Tensor | None,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sums over the rows, and d loss / d draft logits; consumes both logits.

    Returns:
        sums_4: weighted loss, acceptance, agreement, mass outside the draft vocabulary.
        dlogits_CU: kl: q - p. tv, with m = [q < p]: q (q . m - m). lk: that of tv / overlap.
    """
    top_C, target_top_C = draft_CU.argmax(-1), target_CV.argmax(-1)
    target_CU, inside_C1 = target_CV, target_CV.new_ones(len(target_CV), 1)
    if rows_U is not None:
        top_C = rows_U[top_C]
        target_CU = target_CV.index_select(-1, rows_U)
    p_CU, log_zp_C1 = _softmax(target_CU)
    q_CU, log_zq_C1 = _softmax(draft_CU)
    if rows_U is not None:
        inside_C1 = (log_zp_C1 - target_CV.logsumexp(-1, keepdim=True)).exp_().clamp_max_(1)
    if kind == "kl":
        log_ratio_CU = target_CU.sub_(draft_CU)
        loss_C1 = log_ratio_CU.mul_(p_CU).sum(-1, keepdim=True) + (log_zq_C1 - log_zp_C1)

    # From here on the memory of both logits is free for the overlaps.
    overlap_C1 = torch.minimum(p_CU, q_CU, out=target_CU).sum(-1, keepdim=True)
    accepted_C1 = overlap_C1
    if rows_U is not None:
        torch.mul(p_CU, inside_C1, out=draft_CU)
        accepted_C1 = torch.minimum(draft_CU, q_CU, out=draft_CU).sum(-1, keepdim=True)
    if kind == "tv":
        loss_C1 = 1 - overlap_C1
    if kind == "lk":
        # Disjoint distributions round to an overlap of 0: a large loss, and no gradient.
        overlap_C1 = overlap_C1.clamp_min(torch.finfo(overlap_C1.dtype).tiny)
        loss_C1 = -overlap_C1.log()
    if weights_C1 is not None:
        loss_C1 = loss_C1 * weights_C1
    agreed_C1 = (top_C == target_top_C)[:, None].to(overlap_C1.dtype)
    sums_4 = torch.cat([loss_C1, accepted_C1, agreed_C1, 1 - inside_C1], 1).sum(0)
    if not needs_gradient:
        return sums_4, None

    if kind == "kl":
        dlogits_CU = q_CU.sub_(p_CU)
    else:
        capped_CU = torch.lt(q_CU, p_CU, out=p_CU).mul_(q_CU)
        dlogits_CU = q_CU.mul_(capped_CU.sum(-1, keepdim=True)).sub_(capped_CU)
    if kind == "lk":
        dlogits_CU /= overlap_C1
    if weights_C1 is not None:
        dlogits_CU *= weights_C1
    return sums_4, dlogits_CU


def _softmax(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and log normaliser; the latter from the largest entry, not a second exp."""
    probs_CV = logits_CV.softmax(-1)
    log_normaliser_C1 = logits_CV.amax(-1, keepdim=True) - probs_CV.amax(-1, keepdim=True).log_()
    return probs_CV, log_normaliser_C1
