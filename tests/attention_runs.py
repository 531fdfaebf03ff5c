"""What tests of attention share: rows in their memory order, outputs with their gradients."""

import torch


def rows(*shape, dtype=torch.float64, seed=0):
    """Random [..., heads, T, D] in the memory order [..., T, heads, D]."""
    *batch, heads, T, D = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, T, heads, D, generator=generator, dtype=torch.float64)
    return x.to(dtype).transpose(-3, -2).requires_grad_()


def output_and_gradients(attend, inputs, **options) -> list[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, **options)
    weight = rows(*out.shape, seed=4).detach().to(out.dtype)
    gradients = torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)
    return [out.detach(), *gradients]
