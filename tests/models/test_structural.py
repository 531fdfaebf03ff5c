import pytest
import torch
import torch.nn.functional as F
from attention_runs import dense_structural_mask, output_and_gradients, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedraft.models.heads.structural import structural_attention

torch.set_num_threads(1)


def make_inputs(B=1, N=2, J=2, T=9, D=4, R=4, dtype=torch.float64):
    return (
        rows(B, N, T, D, dtype=dtype, seed=1),
        rows(R, B, J, T, D, dtype=dtype, seed=2),
        rows(R, B, J, T, D, dtype=dtype, seed=3),
    )


def dense_attention(query, keys, values, *, occupancy, depth=0, block_of_depth=None):
    """Oracle: one masked softmax per example over all R T keys."""
    R, _, J, T, D = keys.shape
    blocks = tuple(range(R) if block_of_depth is None else block_of_depth)
    n, G, outs = len(blocks) - 1, query.shape[1] // J, []
    for b, a in enumerate(occupancy):
        mask = dense_structural_mask(T, n, a, depth, blocks)
        mask = F.pad(mask, (0, R * T - mask.shape[1]))
        if not mask.any():
            outs.append(query[b] * 0)
            continue
        key, value = (
            x[:, b].transpose(0, 1).flatten(1, 2).repeat_interleave(G, 0) for x in (keys, values)
        )
        scores = (query[b] @ key.mT / D**0.5).masked_fill(~mask, -torch.inf)
        outs.append(scores.softmax(-1) @ value)
    return torch.stack(outs)


def assert_equals_dense(inputs, **options):
    expected = output_and_gradients(dense_attention, inputs, **options)
    actual = output_and_gradients(structural_attention, inputs, **options)
    for name, x, y in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=lambda m, k=name: f"{k}: {m}")


def visible(t, depth, occupancy, n):
    """Spell out the rule: {(block, T')} for one query."""
    if occupancy <= depth < n:
        return set()
    distances = {T: t - T for T in range(t + 1)}
    return {(depth + x if depth + x < occupancy else n, T) for T, x in distances.items()}


@pytest.mark.parametrize("n", [1, 3])
def test_the_mask_is_the_rule_for_every_occupancy_and_depth(n):
    T = 6
    for occupancy in range(1, n + 1):
        for depth in range(n + 1):
            mask = dense_structural_mask(T, n, occupancy, depth).view(T, n + 1, T)
            seen = [{tuple(x) for x in mask[t].nonzero().tolist()} for t in range(T)]
            assert seen == [visible(t, depth, occupancy, n) for t in range(T)]


@st.composite
def cases(draw):
    n = draw(st.integers(1, 5))
    R = draw(st.integers(1, n + 1))
    blocks = draw(
        st.none() if n + 1 == R else st.lists(st.integers(0, R - 1), min_size=n + 1, max_size=n + 1)
    )
    J = draw(st.sampled_from([1, 2]))
    occupancy = draw(st.lists(st.integers(1, n), min_size=1, max_size=4))
    shape = dict(B=len(occupancy), N=J * draw(st.sampled_from([1, 3])), J=J, R=R)
    shape["T"] = draw(st.integers(1, 12))
    return shape, dict(occupancy=occupancy, depth=draw(st.integers(0, n)), block_of_depth=blocks)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_output_and_gradients_equal_the_dense_reference(case):
    shape, options = case
    assert_equals_dense(make_inputs(**shape), **options)


def test_several_kernel_blocks_agree_with_the_dense_reference():
    """The fused kernel cuts its input into tiles with up to 512 rows: cross one boundary."""
    assert_equals_dense(make_inputs(T=600, N=2, J=1, R=3), occupancy=[2])


def test_an_unused_block_gets_zero_gradient_and_a_strided_input_the_same_result():
    query, keys, values = make_inputs(R=5)
    options = dict(occupancy=[2], block_of_depth=[0, 1, 3, 4])
    keys_strided = keys.detach().mT.contiguous().mT.requires_grad_()
    assert keys_strided.stride(-1) != 1
    out = structural_attention(query, keys_strided, values, **options)
    out.sum().backward()
    torch.testing.assert_close(out, structural_attention(query, keys, values, **options))
    used = [bool(x.any()) for x in keys_strided.grad]
    assert used == [True, True, False, False, True]


def test_gradients_come_back_in_the_memory_order_of_rows():
    inputs = make_inputs(B=2, N=4, J=2, T=7)
    out, dquery, dkeys, dvalues = output_and_gradients(
        structural_attention, inputs, occupancy=[3, 3]
    )
    for x in (out, dquery, dkeys, dvalues):
        assert x.transpose(-3, -2).is_contiguous()


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"]
)
def test_lower_precision_is_close_to_float64(dtype, tolerance):
    inputs = make_inputs(B=2, N=4, J=2, T=70, D=16, R=5, dtype=dtype)
    options = dict(occupancy=[4, 2], block_of_depth=[0, 1, 2, 3, 4])
    expected = output_and_gradients(dense_attention, [x.double() for x in inputs], **options)
    actual = output_and_gradients(structural_attention, inputs, **options)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype is dtype
        assert (x - y).abs().max() < tolerance * y.abs().max()


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_inputs_dtype():
    query, keys, values = make_inputs(T=20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = structural_attention(query, keys.bfloat16(), values, occupancy=[2])
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert query.grad.dtype is values.grad.dtype is torch.float32


def attention_through_an_undifferentiated_lse(query, keys, values, *, occupancy):
    """Known-bad: merges like the real one, but leaves the backward to autograd.

    The fused op's log-sum-exp is a constant to autograd, so the weights get no gradient from it.
    """
    W, T, scale = occupancy[0], query.shape[2], query.shape[3] ** -0.5
    far, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[:, :, W:], keys[-1, :, :, : T - W], values[-1, :, :, : T - W], 0.0, True, scale=scale
    )
    far, lse = F.pad(far, (0, 0, W, 0)), F.pad(lse, (W, 0), value=-torch.inf)
    shifted = [[F.pad(x[i, :, :, : T - i], (0, 0, i, 0)) for i in range(W)] for x in (keys, values)]
    band = torch.stack([(query * key).sum(-1) * scale for key in shifted[0]], -1)
    band = band.masked_fill(torch.arange(T)[:, None] < torch.arange(W), -torch.inf)
    weights = torch.cat([lse[..., None], band], -1).softmax(-1)
    near = sum(weights[..., i + 1, None] * value for i, value in enumerate(shifted[1]))
    return weights[..., :1] * far + near


def test_a_merge_left_to_autograd_has_the_right_output_and_wrong_gradients():
    inputs = make_inputs(T=12)
    right = output_and_gradients(structural_attention, inputs, occupancy=[3])
    wrong = output_and_gradients(attention_through_an_undifferentiated_lse, inputs, occupancy=[3])
    torch.testing.assert_close(wrong[0], right[0])
    assert (wrong[1] - right[1]).abs().max() > 0.1 * right[1].abs().max()
    assert (wrong[2][-1] - right[2][-1]).abs().max() > 0.1 * right[2][-1].abs().max()


@pytest.mark.parametrize(
    "options, field",
    [
        (dict(occupancy=[4]), "occupancy"),
        (dict(occupancy=[0]), "occupancy"),
        (dict(occupancy=[1, 1]), "occupancy"),
        (dict(occupancy=[1], depth=4), "depth"),
        (dict(occupancy=[1], block_of_depth=[0, 4]), "block_of_depth"),
    ],
)
def test_a_bad_argument_is_refused_by_name(options, field):
    with pytest.raises(AssertionError, match=f"^{field} "):
        structural_attention(*make_inputs(), **options)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"^query: 3 heads cannot share 2"):
        structural_attention(*make_inputs(N=3, J=2), occupancy=[1])


def test_stacked_depths_with_ragged_blocks_equal_one_call_per_depth():
    """Simulate a module with a stream for every depth: block k holds the examples with depth k."""
    occupancy, n = [3, 2, 1], 3
    counts = [3, 2, 1, 3]
    query, keys, values = make_inputs(B=3, N=4, J=2, R=4)
    queries = [rows(count, 4, 9, 4, seed=5 + d) for d, count in enumerate(counts)]
    ragged = [[x[k, :count] for k, count in enumerate(counts)] for x in (keys, values)]

    def stacked():
        return structural_attention(
            torch.cat(queries), *ragged, occupancy=occupancy, depth=range(n + 1)
        )

    def one_by_one():
        outs = [
            structural_attention(
                q, keys[:, :count], values[:, :count], occupancy=occupancy[:count], depth=d
            )
            for d, (q, count) in enumerate(zip(queries, counts, strict=True))
        ]
        return torch.cat(outs)

    weight = torch.randn(sum(counts), 4, 9, 4, dtype=torch.float64)
    results = [
        torch.autograd.grad((out * weight).sum(), [*queries, keys, values]) + (out,)
        for out in (stacked(), one_by_one())
    ]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
