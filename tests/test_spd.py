"""The speculation module: what it trains is what it decodes, at every occupancy."""

import pytest
import torch
from conftest import tiny_llama

from pipedraft.models import load_draft
from pipedraft.models.draft import TargetReference
from pipedraft.models.layers import LayerConfig
from pipedraft.models.spd import SPD, SPDConfig, SPDState, feature_layers
from pipedraft.models.target import capture_hidden, target_fingerprint

LENGTH = 13


def make_module(target, **options) -> SPD:
    fingerprint = target_fingerprint(target)
    config = SPDConfig(num_target_layers=fingerprint["num_layers"], **options)
    layer = LayerConfig.from_target(target.config)
    module = SPD(config, layer, TargetReference(name="tiny", fingerprint=fingerprint))
    module.initialise(target)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():  # no projection may stay an identity or a zero
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data.add_(noise / parameter.shape[-1] ** 0.5)
    return module.double().eval()


def decode_time_output(module, taps, newest: int, occupancy: int) -> torch.Tensor:
    """Logits after position ``newest`` when ``occupancy`` tokens are in flight, by the runtime."""
    first = newest - min(occupancy, newest + 1) + 1  # oldest row in flight
    state = SPDState()
    if first > 0:
        half = first // 2
        for start, stop in ((0, half), (half, first)):
            if stop > start:
                rows = {layer: hidden[start:stop] for layer, hidden in taps.items()}
                module.extend(state, rows, start)
    rows = newest + 1 - first
    depths = [newest - position for position in range(first, newest + 1)]
    seen = {}
    for layer, hidden in taps.items():  # only what a row of its depth has passed
        deep_enough = [
            index for index, depth in enumerate(depths) if layer in module.feature_layers[depth]
        ]
        known = max(deep_enough, default=-1) + 1
        seen[layer] = hidden[first : first + known]
    logits = module.propose(
        state,
        seen,
        depths=depths,
        positions=torch.arange(first, newest + 1),
        visible_RR=torch.ones(rows, rows, dtype=torch.bool).tril(),
    )
    return logits[0]


@pytest.mark.parametrize("query", ["newest", "all"])
@pytest.mark.parametrize(
    "features",
    [{"features": "paper"}, {"features": "thirds"}, {"features": "anchors", "anchors": (4, 8)}],
)
def test_training_logits_equal_decoding_logits_at_every_occupancy(query, features):
    target = tiny_llama(layers=8)
    module = make_module(target, num_stages=4, num_layers=2, query=query, **features)
    ids = torch.randint(0, target.config.vocab_size, (1, LENGTH))
    taps = {k: v.double() for k, v in capture_hidden(target, ids, module.taps).items()}
    for occupancy in range(1, 5):
        with torch.no_grad():
            trained = module.logits(module(taps, [occupancy]))[0]
        for newest in range(LENGTH):
            decoded = decode_time_output(
                module, {k: v[0] for k, v in taps.items()}, newest, occupancy
            )
            assert torch.allclose(trained[newest], decoded, atol=1e-9), (occupancy, newest)


def test_a_threshold_on_the_row_instead_of_the_newest_token_disagrees():
    """The released code tests t - T where the distance to the newest token belongs."""
    from pipedraft.models import structural

    target = tiny_llama(layers=8)
    module = make_module(target, num_stages=4, num_layers=2, query="all")
    ids = torch.randint(0, target.config.vocab_size, (1, LENGTH))
    taps = {k: v.double() for k, v in capture_hidden(target, ids, module.taps).items()}
    right = structural.structural_attention

    def mutant(query, keys, values, *, occupancy, depth=0, block_of_depth=None):
        if depth in (0, 4):
            return right(
                query, keys, values, occupancy=occupancy, depth=depth, block_of_depth=block_of_depth
            )
        widened = [min(a + depth, 4) for a in occupancy]  # t - T >= a  instead of  d + t - T >= a
        return right(
            query, keys, values, occupancy=widened, depth=depth, block_of_depth=block_of_depth
        )

    from pipedraft.models import spd

    with torch.no_grad():
        spd.structural_attention = mutant
        try:
            wrong = module.logits(module(taps, [2]))[0]
        finally:
            spd.structural_attention = right
    decoded = decode_time_output(module, {k: v[0] for k, v in taps.items()}, LENGTH - 1, 2)
    assert not torch.allclose(wrong[-1], decoded, atol=1e-4)


def test_mixed_occupancies_in_one_batch_equal_single_examples():
    target = tiny_llama(layers=8)
    module = make_module(target, num_stages=4, num_layers=2)
    ids = torch.randint(0, target.config.vocab_size, (3, LENGTH))
    taps = {k: v.double() for k, v in capture_hidden(target, ids, module.taps).items()}
    together = module(taps, [4, 2, 1])
    for example, occupancy in enumerate((4, 2, 1)):
        single = {k: v[example : example + 1] for k, v in taps.items()}
        assert torch.allclose(module(single, [occupancy])[0], together[example], atol=1e-9)


def test_feature_layers_follow_the_paper_and_the_release():
    paper = SPDConfig(num_stages=4, num_target_layers=16)
    assert feature_layers(paper) == [(0,), (0, 2, 4), (0, 4, 8), (0, 6, 12), (0, 8, 16)]
    thirds = SPDConfig(num_stages=4, num_target_layers=16, features="thirds")
    assert feature_layers(thirds) == [(0,), (0, 4), (0, 4, 8), (0, 4, 8, 12), (0, 5, 10, 16)]
    anchors = SPDConfig(num_stages=4, num_target_layers=16, features="anchors", anchors=(8, 16))
    assert feature_layers(anchors) == [(0,), (0,), (0, 8), (0, 8), (0, 8, 16)]


def test_a_saved_module_loads_and_refuses_another_target(tmp_path):
    target = tiny_llama(layers=8)
    module = make_module(target, num_stages=4, num_layers=2).float()
    module.save(tmp_path)
    loaded = load_draft(str(tmp_path), target)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with pytest.raises(ValueError, match="num_layers: 8 != 6"):
        load_draft(str(tmp_path), tiny_llama(layers=6))


def test_a_truncated_weight_file_is_bad_input(tmp_path):
    target = tiny_llama(layers=8)
    make_module(target, num_stages=4, num_layers=2).float().save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="missing or damaged"):
        load_draft(str(tmp_path), target)
