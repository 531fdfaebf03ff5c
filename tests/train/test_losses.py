import itertools
from dataclasses import replace

import pytest
import torch
from pretended_device import Pretended, pretended_cuda
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedraft.train import losses
from pipedraft.train.log import flop_counter
from pipedraft.train.losses import chunked_distillation
from pipedraft.train.methods import LossKind

torch.set_num_threads(1)
KINDS = ("kl", "tv", "lk", "lk_hybrid", "ce", "ce_l1", "rkl", "jsd", "topk_kl")
ETA, TOP_K, SHARE = 2.0, 3, 0.3
MEASURES = {kind: LossKind(kind=kind, eta=ETA, top_k=TOP_K, ce_share=SHARE) for kind in KINDS}


def make_inputs(M=11, H=5, teacher_H=7, V=13, U=None, dtype=torch.float64, seed=0):
    """Return (hidden, head, teacher hidden, teacher head) and the draft tokens' target ids."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ids = None if U is None else torch.randperm(V, generator=generator)[:U]
    hidden, head = randn(M, H).requires_grad_(), randn(V if U is None else U, H).requires_grad_()
    return (hidden, head, randn(M, teacher_H), randn(V, teacher_H)), ids


def plain(hidden, head, teacher_hidden, teacher_head, *, kind, ids=None, weights=None):
    """Oracle: the formulas on whole matrices, gradients by autograd."""
    p_full = (teacher_hidden @ teacher_head.t()).softmax(-1)
    kept = p_full if ids is None else p_full[:, ids]
    p = kept / kept.sum(-1, keepdim=True)
    q = (hidden @ head.t()).softmax(-1)
    best, index = p.topk(TOP_K)
    best = best / best.sum(-1, keepdim=True)
    mixed = (p + q) / 2

    def divergence(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    # The acceptance rate uses the target's whole distribution.
    rate = torch.minimum(kept, q).sum(-1)
    share = (-ETA * rate).exp().detach()
    hard = -q.log().gather(-1, p.argmax(-1, keepdim=True))[:, 0]
    # Target mass outside the draft vocabulary is part of the distance.
    distance = (kept - q).abs().sum(-1) + 1 - kept.sum(-1)
    loss = {
        "kl": lambda: divergence(p, q),
        "tv": lambda: 1 - rate,
        "lk": lambda: -rate.log(),
        "lk_hybrid": lambda: share * divergence(p, q) + (1 - share) * (1 - rate),
        "ce": lambda: hard,
        "ce_l1": lambda: SHARE * hard + (1 - SHARE) * distance,
        "rkl": lambda: divergence(q, p),
        "jsd": lambda: (divergence(p, mixed) + divergence(q, mixed)) / 2,
        "topk_kl": lambda: divergence(best, q.gather(-1, index)),
    }[kind]()
    top = q.argmax(-1) if ids is None else ids[q.argmax(-1)]
    return (loss if weights is None else loss * weights).sum(), {
        "acceptance": torch.minimum(kept, q).sum(),
        "agreement": (top == p_full.argmax(-1)).sum(),
        "mass_outside": (1 - kept.sum(-1)).sum(),
    }


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs[:2])


@pytest.mark.parametrize(
    "kind, U, weighted", list(itertools.product(KINDS, (None, 6), (False, True)))
)
def test_loss_gradients_and_metrics_equal_the_plain_formula(kind, U, weighted):
    inputs, ids = make_inputs(U=U)
    weights = torch.linspace(0, 2, len(inputs[0]), dtype=torch.float64) if weighted else None
    expected, metrics = plain(*inputs, kind=kind, ids=ids, weights=weights)
    options = {"measure": MEASURES[kind], "teacher_rows_U": ids, "weights_M": weights}
    result = chunked_distillation(*inputs, chunk_rows=4, **options)
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    for name, value in metrics.items():
        actual = result.sums()[name]
        assert not actual.requires_grad
        torch.testing.assert_close(actual, value.double().detach(), rtol=1e-10, atol=1e-12)
    assert len(result.divergence_M) == len(inputs[0])
    actual = gradients(3 * result.loss, inputs)
    for x, y in zip(actual, gradients(3 * expected, inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_head_adds_its_logits(kind):
    """Equals one head over all columns, with its gradient in two parts."""
    (hidden, head, *teacher), _ = make_inputs(H=9)
    whole = chunked_distillation(hidden, head, *teacher, measure=MEASURES[kind], chunk_rows=4)
    first, second = (x.detach().requires_grad_() for x in head.split([5, 4], 1))
    parts = chunked_distillation(
        hidden, first, *teacher, pair_weight_UR=second, measure=MEASURES[kind], chunk_rows=3
    )
    torch.testing.assert_close(parts.loss, whole.loss)
    expected = gradients(whole.loss, (hidden, head))
    dhidden, *dheads = torch.autograd.grad(parts.loss, (hidden, first, second))
    torch.testing.assert_close(dhidden, expected[0])
    torch.testing.assert_close(torch.cat(dheads, 1), expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_zero_loss_and_zero_gradients(kind):
    inputs, _ = make_inputs(M=0)
    result = chunked_distillation(*inputs, measure=MEASURES[kind])
    assert result.loss.item() == 0 and len(result.divergence_M) == 0
    dhidden, dhead = gradients(result.loss, inputs)
    assert dhidden.shape == (0, 5) and not dhead.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_equal_to_the_target_has_no_loss_and_full_acceptance(kind):
    (hidden, head, *_), _ = make_inputs()
    result = chunked_distillation(hidden, head, hidden, head, measure=MEASURES[kind])
    assert abs(result.sums()["acceptance"].item() - 11) < 1e-12
    if kind in ("ce", "ce_l1", "topk_kl"):  # their labels are a part of the distribution
        return
    assert abs(result.loss.item()) < 1e-12
    assert result.sums()["agreement"].item() == 11
    for gradient in gradients(result.loss, (hidden, head)):
        assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_disjoint_distributions_stay_finite(kind):
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    head = torch.tensor([[300.0, 0.0], [-300.0, 0.0]], requires_grad=True)
    result = chunked_distillation(hidden, head, -hidden, head, measure=MEASURES[kind])
    assert result.loss.isfinite() and result.loss > (
        0.69 if kind == "jsd" else 0.99
    )  # at most log 2
    assert all(x.isfinite().all() for x in gradients(result.loss, (hidden, head)))


def test_a_frozen_head_gets_no_gradient_and_leaves_the_other_unchanged():
    inputs, _ = make_inputs()
    expected = gradients(chunked_distillation(*inputs).loss, inputs)[0]
    hidden, head, *teacher = inputs
    result = chunked_distillation(hidden, head.detach(), *teacher)
    result.loss.backward()
    assert head.grad is None
    torch.testing.assert_close(hidden.grad, expected)


def test_without_gradients_the_sums_are_the_same_and_nothing_is_kept():
    inputs, _ = make_inputs()
    with torch.no_grad():
        result = chunked_distillation(*inputs)
    assert not result.loss.requires_grad
    torch.testing.assert_close(result.loss, chunked_distillation(*inputs).loss.detach())


def test_a_second_backward_is_refused_instead_of_scaled_twice():
    inputs, _ = make_inputs()
    loss = chunked_distillation(*inputs).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already handed"):
        loss.backward()


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_bfloat16_is_close_and_gradients_have_the_dtype_of_their_inputs(autocast):
    inputs, _ = make_inputs(M=64, H=32, V=300)
    inputs = [x.detach() / 4 for x in inputs]
    dtype = torch.float32 if autocast else torch.bfloat16
    lower = [x.to(dtype) for x in inputs]
    for x in (*inputs[:2], *lower[:2]):
        x.requires_grad_()
    expected = chunked_distillation(*inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = chunked_distillation(*lower, chunk_rows=16)
    assert actual.loss.dtype is torch.float32
    torch.testing.assert_close(actual.loss.double(), expected.loss, rtol=2e-2, atol=0)
    actual.loss.backward()
    for x, y in zip(lower[:2], gradients(expected.loss, inputs), strict=True):
        assert x.grad.dtype is dtype
        assert (x.grad - y).norm() < 0.03 * y.norm()


@pytest.mark.parametrize("kind", ["tv", "lk", "lk_hybrid"])
def test_acceptance_counts_what_the_draft_vocabulary_lacks(kind):
    """Known-bad: the target renormalized to the draft vocabulary gives another gradient."""
    inputs, ids = make_inputs(U=6)
    hidden, head, teacher_hidden, teacher_head = inputs
    measure = MEASURES[kind]
    wrong = chunked_distillation(hidden, head, teacher_hidden, teacher_head[ids], measure=measure)
    right = chunked_distillation(*inputs, teacher_rows_U=ids, measure=measure)
    assert right.loss > wrong.loss
    difference = gradients(wrong.loss, inputs)[1] - gradients(right.loss, inputs)[1]
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_best_token_is_outside_are_dropped_on_request(kind):
    inputs, ids = make_inputs(U=6)
    _, _, teacher_hidden, teacher_head = inputs
    inside = torch.isin((teacher_hidden @ teacher_head.t()).argmax(-1), ids)
    assert 0 < inside.sum() < len(inside)
    options = {"measure": MEASURES[kind], "teacher_rows_U": ids}
    expected = chunked_distillation(*inputs, weights_M=inside.double(), **options)
    options["measure"] = replace(MEASURES[kind], drops_outside=True)
    result = chunked_distillation(*inputs, chunk_rows=4, **options)
    torch.testing.assert_close(result.loss, expected.loss)
    for x, y in zip(gradients(result.loss, inputs), gradients(expected.loss, inputs), strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(result.acceptance_M, expected.acceptance_M)


def test_renormalizing_matters_with_a_draft_vocabulary():
    """Known-bad: forgetting to renormalize the restricted target gives another gradient."""
    inputs, ids = make_inputs(U=6)
    hidden, head, teacher_hidden, teacher_head = inputs
    kept = (teacher_hidden @ teacher_head.t()).softmax(-1)[:, ids]
    wrong = -(kept * (hidden @ head.t()).log_softmax(-1)).sum()
    right = chunked_distillation(*inputs, teacher_rows_U=ids).loss
    difference = gradients(wrong, inputs)[1] - gradients(right, inputs)[1]
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize(
    "change, field",
    [
        (dict(measure=LossKind(kind="js")), "kind"),
        (dict(teacher_rows_U=torch.arange(6)), "head_weight"),
    ],
)
def test_a_bad_argument_is_refused_by_name(change, field):
    inputs, _ = make_inputs()
    with pytest.raises(ValueError, match=f"^{field}: "):
        chunked_distillation(*inputs, **change)


def test_rows_that_do_not_match_are_refused():
    (hidden, head, teacher_hidden, teacher_head), _ = make_inputs()
    with pytest.raises(ValueError, match="^teacher_hidden: 10 rows for 11"):
        chunked_distillation(hidden, head, teacher_hidden[:10], teacher_head)


# -- on a GPU ---------------------------------------------------------------------------------

PRODUCTS_PER_S, BYTES_PER_S = 650e12, 2.6e12
"""Reachable speeds on an H100: FLOPs in bfloat16, and memory bytes."""
CUDA = torch.device("cuda", 0)


class Traffic(TorchDispatchMode):
    """Counts bytes read and written by operations, except factors and results of products."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        given = [x for x in args if isinstance(x, Tensor)]
        if name in ("mm", "addmm"):  # the addend of a product is read and written besides
            self.bytes += sum(2 * x.nbytes for x in given[:-2])
        elif name in ("gather", "index_select"):
            self.bytes += 2 * made.nbytes
        elif not func.is_view and name != "empty_like":
            written = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
            self.bytes += sum(x.nbytes for x in [*given, *written])
        return made


def times_s(U, V, **options) -> tuple[float, float]:
    """Times for the products and for everything else: 8,192 rows with an 8B model's hidden size."""

    def empty(*shape, dtype=torch.bfloat16):
        return Pretended(torch.empty(shape, dtype=dtype, device="meta"), CUDA)

    hidden, head, teacher, teacher_head = (empty(n, 4096) for n in (8192, U, 8192, V))
    ids = None if U == V else empty(U, dtype=torch.int64)
    with pretended_cuda(), Traffic() as found, flop_counter() as flops:
        inputs = (hidden.requires_grad_(), head.requires_grad_(), teacher, teacher_head)
        chunked_distillation(*inputs, teacher_rows_U=ids, **options)
    assert flops.get_total_flops() == 2 * 8192 * 4096 * (V + 3 * U)
    return flops.get_total_flops() / PRODUCTS_PER_S, found.bytes / BYTES_PER_S


SIZES = [(32_000, 32_000), (32_000, 128_256), (128_256, 128_256), (248_320, 248_320)]


@pytest.mark.parametrize(("U", "V"), SIZES)
def test_all_that_is_no_product_takes_less_time_than_the_products(U, V):
    products_s, others_s = times_s(U, V)
    assert 0 < others_s <= products_s


def test_rows_of_a_fixed_number_would_take_longer():
    """Known-bad: 512 rows at a time whatever the vocabulary."""
    products_s, others_s = times_s(248_320, 248_320, chunk_rows=512)
    assert others_s > products_s


def test_the_vocabulary_decides_how_many_rows_have_logits_together(monkeypatch):
    inputs, _ = make_inputs(M=40, V=16)
    sizes, right = [], losses._softmax
    monkeypatch.setattr(losses, "_softmax", lambda x: sizes.append(len(x)) or right(x))
    for chunk_bytes, max_rows, expected in ((16 * 8 * 10, 99, 10), (1, 99, 1), (10**6, 25, 25)):
        monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr(losses, "MAX_ROWS", max_rows)
        sizes.clear()
        chunked_distillation(*inputs)
        assert max(sizes) == expected and sum(sizes) == 2 * 40


def rounded_parts(total, left, right):
    total += (left @ right).to(total.dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_heads_gradient_in_bfloat16_is_rounded_once(device, monkeypatch):
    """The number of chunks does not matter. Known-bad: each chunk's part is rounded too."""
    inputs, _ = make_inputs(M=256, H=32, V=100)
    x, head, *teacher = ((y.detach() / 4).bfloat16() for y in inputs)

    def gradient(rows) -> tuple[Tensor, Tensor]:
        """Return the gradient, and its value without any rounding."""
        factors, add = [], losses._add_product
        with pretended_cuda(), monkeypatch.context() as patch:
            patch.setattr(losses, "_add_product", lambda *x: factors.append(x[1:]) or add(*x))
            moved = [y.clone().to(device).requires_grad_() for y in (x, head)]
            rest = [y.to(device) for y in teacher]
            chunked_distillation(*moved, *rest, chunk_rows=rows).loss.backward()
            exact = sum(left.cpu().double() @ right.cpu().double() for left, right in factors)
            return moved[1].grad.cpu(), exact

    for rows in (256, 2):
        found, exact = gradient(rows)
        assert found.dtype == torch.bfloat16 and torch.equal(found, exact.float().bfloat16())
    monkeypatch.setattr(losses, "_add_product", rounded_parts)
    assert not torch.equal(found, gradient(2)[0])
