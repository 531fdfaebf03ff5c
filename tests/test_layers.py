import pytest
import torch
import torch.nn.functional as F

from pipedraft.models.layers import OneDNNLinear, linear


def with_gradients(multiply, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = multiply(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("shape", [(2, 96, 24), (131, 24), (3, 24)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp32_products_and_gradients_are_those_of_float64(shape, has_bias):
    """131 rows: no multiple of any block; 3 rows: too few for oneDNN."""
    x, weight, bias = torch.randn(shape), torch.randn(40, 24), torch.randn(40)
    inputs = (x, weight, bias) if has_bias else (x, weight)
    expected = with_gradients(F.linear, *(x.double() for x in inputs))
    for actual, exact in zip(with_gradients(linear, *inputs), expected, strict=True):
        assert actual.is_contiguous()
        assert (actual - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_strided_input_and_a_strided_weight_give_the_same_product():
    x, weight = torch.randn(300, 2, 24)[:, 1], torch.randn(24, 40).t()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


def test_inside_the_mode_every_linear_layer_is_redirected_and_outside_none():
    layer, x = torch.nn.Linear(24, 40), torch.randn(200, 24)
    with OneDNNLinear():
        inside = layer(x)
    assert torch.equal(inside, linear(x, layer.weight, layer.bias))
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_pass_through_unchanged(dtype):
    x, weight = torch.randn(200, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
