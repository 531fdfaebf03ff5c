"""Test causal attention by bfloat16 products on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_llama

from pipedraft.models.speed import attending, causal
from pipedraft.models.target import capture_hidden

BF16 = torch.autocast("cpu", torch.bfloat16)
NEEDS_BF16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="no bfloat16 products"
)


@pytest.mark.parametrize("rows", [1, 60, 128, 300])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_blocks_are_causal_attention(rows, key_heads):
    query = torch.randn(2, rows, 4, 16, dtype=torch.float64).transpose(1, 2)
    keys, values = (
        torch.randn(2, rows, key_heads, 16, dtype=torch.float64).transpose(1, 2) for _ in range(2)
    )
    for scale in (None, 0.1):
        expected = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=True, scale=scale
        )
        torch.testing.assert_close(causal.causal(query, keys, values, scale), expected)


def counted(monkeypatch) -> list[int]:
    calls, real = [], causal.causal
    monkeypatch.setattr(causal, "causal", lambda *x: calls.append(x[0].shape[2]) or real(*x))
    return calls


@NEEDS_BF16
@pytest.mark.parametrize("lengths", [None, [100, 1, 99]])
def test_states_for_training_are_as_near_to_float32s_as_with_torchs_kernel(lengths, monkeypatch):
    target, calls = tiny_llama(), counted(monkeypatch)
    ids = torch.randint(0, target.config.vocab_size, (1, 200))
    exact = capture_hidden(target, ids, [0, 1, 2], lengths)
    assert not calls, "float32 stays with torch's kernel"

    def error() -> torch.Tensor:
        with BF16:
            found = capture_hidden(target, ids, [0, 1, 2], lengths)
        return torch.stack([(found[i] - exact[i]).norm() / exact[i].norm() for i in (1, 2)])

    ours = error()
    num_layers = target.config.num_hidden_layers
    assert sorted(calls) == sorted([200] * num_layers if lengths is None else lengths * num_layers)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    calls.clear()
    torchs = error()
    assert not calls and (ours < 1.5 * torchs).all() and (torchs < 0.02).all()


@NEEDS_BF16
def test_a_mask_stays_with_torchs_kernel(monkeypatch):
    calls = counted(monkeypatch)
    query = torch.randn(1, 2, 8, 16).bfloat16()
    mask = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
    with BF16, causal.multiplying(torch.device("cpu"), None):
        found = attending._passing.attend(query, query, query, mask)
    expected = F.scaled_dot_product_attention(query, query, query, mask)
    assert not calls and torch.equal(found, expected)
