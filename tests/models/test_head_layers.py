"""Heads' layers after attention by compiled kernels: torch's results, and when torch computes."""

import pytest
import torch
from tiny_drafts import make_head
from tiny_models import tiny_llama
from torch import nn

from pipedraft.models.speed import head_layers, kernels
from pipedraft.models.speed.head_layers import finish
from pipedraft.models.speed.rounded import round_draft

if kernels.library() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)
KINDS = {"eagle3": "midlayer", "eagle": "layer", "mtp": "layer"}


def make_layer(kind="eagle3", dtype=None):
    torch.manual_seed(0)
    draft = make_head(tiny_llama(layers=6, hidden=64), kind).requires_grad_(False)
    layer = getattr(draft, KINDS[kind])
    for parameter in layer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    if dtype is not None:
        round_draft(draft, dtype)
    return layer


def by_torch(layer, x, attended):
    mixed = x + layer.self_attn.o_proj(attended.flatten(-2))
    return mixed + layer.mlp(layer.post_attention_layernorm(mixed))


def rows_for(layer, num_rows=3):
    attention = layer.self_attn
    x = torch.randn(num_rows, layer.mlp.gate_proj.in_features)
    return x, torch.randn(num_rows, attention.num_heads, attention.head_size)


@torch.inference_mode()
def found_and_expected(layer, num_rows=3):
    x, attended = rows_for(layer, num_rows)
    return finish(layer, x, attended), by_torch(layer, x, attended)


@pytest.mark.parametrize("dtype", [None, torch.int8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_gives_the_result_of_the_operators(kind, dtype):
    layer = make_layer(kind, dtype)
    for num_rows in (1, 2, 7, 40):
        found, expected = found_and_expected(layer, num_rows)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_other_weights_are_noticed():
    layer = make_layer()
    found_and_expected(layer)
    layer.mlp.gate_proj.weight.mul_(-1)  # in place: the joined weights are the same memory
    torch.testing.assert_close(*found_and_expected(layer), atol=1e-5, rtol=1e-5)
    layer.load_state_dict({name: 0.5 * x for name, x in layer.state_dict().items()})
    torch.testing.assert_close(*found_and_expected(layer), atol=1e-5, rtol=1e-5)
    layer.mlp.up_proj.weight = nn.Parameter(-layer.mlp.up_proj.weight, requires_grad=False)
    torch.testing.assert_close(*found_and_expected(layer), atol=1e-5, rtol=1e-5)
    layer.post_attention_layernorm.weight.data = 2 * layer.post_attention_layernorm.weight
    torch.testing.assert_close(*found_and_expected(layer), atol=1e-5, rtol=1e-5)


def test_torch_computes_what_the_kernels_cannot(monkeypatch):
    layer, called, right = make_layer(), [], kernels.after_attention

    def counted(*inputs):
        called.append(len(inputs))
        return right(*inputs)

    monkeypatch.setattr(kernels, "after_attention", counted)
    x, attended = rows_for(layer)
    finish(layer, x, attended)  # training, perhaps
    with torch.inference_mode():
        finish(layer, x[None], attended[None])
        finish(make_layer().requires_grad_(), x, attended)
        finish(make_layer().double(), x.double(), attended.double())
        assert not called
        finish(layer, x, attended)
        assert len(called) == 1
        monkeypatch.setattr(kernels, "library", lambda: None)
        finish(make_layer(), x, attended)
        assert len(called) == 1


def test_gates_in_another_order_are_noticed(monkeypatch):
    """Known-bad: up and gate joined the wrong way round."""
    right = head_layers.join
    monkeypatch.setattr(head_layers, "join", lambda parts: right(parts[::-1]))
    found, expected = found_and_expected(make_layer())
    assert (found - expected).abs().max() > 1e-2
