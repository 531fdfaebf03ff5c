"""The speculation module decodes as it trains, at every occupancy."""

import pytest
import torch
import torch.nn.functional as F
from attention_runs import dense_structural_mask
from tiny_drafts import make_module
from tiny_models import tiny_llama, tiny_qwen3

from pipedraft.models.heads.configs import SPDConfig
from pipedraft.models.heads.spd import SPD, feature_layers
from pipedraft.models.heads.structural import structural_attention
from pipedraft.models.target import capture_hidden

LENGTH = 13


def module_and_taps(batch=1, make_target=tiny_llama, **options):
    """A module for four stages, and its input states for random texts."""
    target = make_target(layers=8)
    module = make_module(target, num_stages=4, num_layers=2, **options)
    ids = torch.randint(0, target.config.vocab_size, (batch, LENGTH))
    taps = capture_hidden(target, ids, module.taps)
    return module, {layer: hidden.double() for layer, hidden in taps.items()}


def decode_time_output(module, taps, newest: int, occupancy: int) -> torch.Tensor:
    """Logits after position ``newest`` with ``occupancy`` tokens in flight, by the runtime."""
    first = newest - min(occupancy, newest + 1) + 1  # oldest row in flight
    caches = module.new_caches()
    if first > 0:
        half = first // 2
        for start, stop in ((0, half), (half, first)):
            if stop > start:
                rows = {layer: hidden[start:stop] for layer, hidden in taps.items()}
                module.extend(caches, rows, start)
    rows = newest + 1 - first
    depths = [newest - position for position in range(first, newest + 1)]
    seen = {}
    for layer, hidden in taps.items():  # only the states that a row at its depth has passed
        deep_enough = [
            index for index, depth in enumerate(depths) if layer in module.feature_layers[depth]
        ]
        known = max(deep_enough, default=-1) + 1
        seen[layer] = hidden[first : first + known]
    logits = module.propose(
        caches,
        seen,
        depths=depths,
        positions=torch.arange(first, newest + 1),
        visible_RR=torch.ones(rows, rows, dtype=torch.bool).tril(),
    )
    return logits[0]


@pytest.mark.parametrize("query", ["newest", "all"])
@pytest.mark.parametrize(
    "features",
    [
        {"features": "paper"},
        {"features": "anchors", "anchors": (4, 8)},
        {"timing": "output_states"},
        {"tokens_per_step": 2},
    ],
)
def test_training_logits_equal_decoding_logits_at_every_occupancy(query, features):
    module, taps = module_and_taps(query=query, **features)
    for occupancy in range(1, module.config.max_in_flight + 1):
        with torch.no_grad():
            trained = module.logits(module(taps, [occupancy]))[0]
        for newest in range(LENGTH):
            decoded = decode_time_output(
                module, {k: v[0] for k, v in taps.items()}, newest, occupancy
            )
            assert torch.allclose(trained[newest], decoded, atol=1e-9), (occupancy, newest)


def test_a_threshold_on_the_row_instead_of_the_newest_token_disagrees(monkeypatch):
    """The released code tests t - T in place of the distance to the newest token."""
    module, taps = module_and_taps(2, query="all")

    def mutant(query, keys, values, *, occupancy, depth, lengths):
        if depth == 0:
            return structural_attention(query, keys, values, occupancy=occupancy)
        outs = []
        for d, rows in zip(depth, query.split([len(block) for block in keys]), strict=True):
            # t - T >= a  instead of  d + t - T >= a
            widened = [min(a + d, 4) for a in occupancy] if d < 4 else occupancy
            outs.append(structural_attention(rows, keys, values, occupancy=widened, depth=d))
        return torch.cat(outs)

    monkeypatch.setattr("pipedraft.models.heads.spd.structural_attention", mutant)
    with torch.no_grad():
        wrong = module.logits(module(taps, [2, 4]))[0]
    decoded = decode_time_output(module, {k: v[0] for k, v in taps.items()}, LENGTH - 1, 2)
    assert not torch.allclose(wrong[-1], decoded, atol=1e-4)


def dense_reference(module: SPD, taps, occupancy) -> torch.Tensor:
    """Oracle: one example and one depth at a time, masked softmax over all (n + 1) T keys."""
    n, T = module.config.num_stages, taps[0].shape[1]
    cos, sin = (part[:, None] for part in module.rotary(torch.arange(T), taps[0].dtype))

    def by_head(layer, rows_SH, name):
        heads = getattr(layer.self_attn, f"{name}_proj")(layer.input_layernorm(rows_SH))
        heads = heads.unflatten(-1, (-1, module.layer_config.head_size))
        if name == "v":
            return heads
        heads = getattr(layer.self_attn, f"{name}_norm")(heads)
        left, right = heads.chunk(2, -1)
        return heads * cos + torch.cat([-right, left], -1) * sin

    outputs = []
    for b, a in enumerate(occupancy):
        streams = [
            module.projections[module.block_of_depth[k]](torch.cat([taps[i][b] for i in layers], 1))
            for k, layers in enumerate(module.feature_layers)
        ]
        for layer in module.layers:
            keys = torch.cat([by_head(layer, x, "k") for x in streams]).transpose(0, 1)
            values = torch.cat([by_head(layer, x, "v") for x in streams]).transpose(0, 1)
            moved = list(streams)
            for d in range(n + 1 if module.config.query == "all" else 1):
                if a <= d < n:  # no such row
                    continue
                attended = F.scaled_dot_product_attention(
                    by_head(layer, streams[d], "q").transpose(0, 1),
                    keys,
                    values,
                    attn_mask=dense_structural_mask(T, n, a, d),
                    enable_gqa=True,
                )
                moved[d] = layer.finish(streams[d], attended.transpose(0, 1))
            streams = moved
        outputs.append(streams[0])
    return torch.stack(outputs)


@pytest.mark.parametrize("query", ["newest", "all"])
@pytest.mark.parametrize("occupancy", [[4, 4, 4], [4, 2, 1], [1, 4, 2], [2, 1, 1]])
@pytest.mark.parametrize(
    "make_target, options",
    [
        (tiny_llama, {}),
        (tiny_qwen3, {"features": "anchors", "anchors": (4, 8)}),
        (tiny_llama, {"bias": True}),
    ],
    ids=["paper", "anchors_qwen3", "bias"],
)
def test_output_and_gradients_equal_a_dense_mask_reference(query, occupancy, make_target, options):
    module, taps = module_and_taps(3, make_target, query=query, **options)
    weight = torch.randn(taps[0].shape, dtype=torch.float64)
    parameters = {
        k: v for k, v in module.named_parameters() if "lm_head" not in k and v.requires_grad
    }
    results = []
    for forward in (module, lambda *args: dense_reference(module, *args)):
        out = forward(taps, occupancy)
        gradients = torch.autograd.grad(
            (out * weight).sum(), list(parameters.values()), allow_unused=True
        )
        results.append((out, gradients))
    (out, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for name, x, y in zip(parameters, gradients, expected_gradients, strict=True):
        assert x is not None, f"{name}: data-parallel training needs a gradient, zero or not"
        y = torch.zeros_like(x) if y is None else y
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8, msg=lambda m, k=name: f"{k}: {m}")


@pytest.mark.parametrize("query", ["newest", "all"])
@pytest.mark.parametrize("lengths", [None, [4, 6, 3]], ids=["padded", "packed"])
def test_rows_that_are_asked_for_equal_those_of_a_whole_pass(query, lengths):
    module, taps = module_and_taps(3 if lengths is None else 1, query=query)
    occupancy, places = [4, 2, 1], torch.tensor([1, 2, 6, 10, 12])
    whole_PH = module(taps, occupancy, lengths).flatten(0, 1)
    some_MH = module(taps, occupancy, lengths, places)
    torch.testing.assert_close(some_MH, whole_PH[places], rtol=1e-9, atol=1e-9)
    parameters = [p for n, p in module.named_parameters() if "lm_head" not in n and p.requires_grad]
    weight = torch.randn(some_MH.shape, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad((x * weight).sum(), parameters) for x in (some_MH, whole_PH[places])
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_feature_layers_follow_the_paper_and_the_release():
    paper = SPDConfig(num_stages=4, num_target_layers=16)
    assert feature_layers(paper) == [(0,), (0, 2, 4), (0, 4, 8), (0, 6, 12), (0, 8, 16)]
    anchors = SPDConfig(num_stages=4, num_target_layers=16, features="anchors", anchors=(8, 16))
    assert feature_layers(anchors) == [(0,), (0,), (0, 8), (0, 8), (0, 8, 16)]
    for name, features, given in (
        ("anchors", "anchors", (8, 17)),
        ("depth_layers", "listed", ((0,), (0, 9), (0,), (0,))),
    ):
        with pytest.raises(ValueError, match=f"model.{name}: .* are not in 0.."):
            SPDConfig(num_stages=4, num_target_layers=16, features=features, **{name: given})
