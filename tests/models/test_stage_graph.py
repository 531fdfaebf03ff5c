"""Layers with fixed shapes against the model's own forward; on a GPU also as CUDA graphs."""

import pytest
import torch
from staged_targets import Controller

from pipedraft.models.speed.cuda_graphs import padded_rows
from pipedraft.models.stages import stage_graphs
from pipedraft.models.stages.stage_graphs import StageGraphs
from pipedraft.models.transformer import stage_cache

NAMES = ["llama", "qwen2", "qwen3_half_sliding", "mistral_sliding"]


def fuzz(name: str, num_stages: int, seed: int) -> Controller:
    controller = Controller(name, num_stages, seed)
    for stage in controller.target.stages:
        stage.cache = stage_cache.StageCache(stage.cache.recurrent_layers)
        stage.graphs = StageGraphs(stage)
    controller.target.prefill(torch.tensor(controller.committed), chunk_rows=5)
    controller.fuzz(num_steps=24)
    return controller


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_fixed_shapes_equal_recomputing_each_path_from_scratch(name, num_stages, monkeypatch):
    """The buffers start with few rows, so that they grow on the way."""
    monkeypatch.setattr(stage_cache, "MIN_CAPACITY", 8)
    controllers = [fuzz(name, num_stages, seed) for seed in range(2)]
    assert sum(controller.num_compared for controller in controllers) > 25
    graphs = controllers[0].target.stages[-1].graphs
    assert graphs._graphs, "no segment went this way"
    assert graphs.stage.cache.capacity > 8


def test_fuzz_catches_rows_written_to_the_place_of_the_next_one(monkeypatch):
    right = StageGraphs._pack

    def shifted(self, packing, *rows):
        packed = right(self, packing, *rows)
        packing.unpack(packed)["slots_P"].add_(1)
        return packed

    monkeypatch.setattr(StageGraphs, "_pack", shifted)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        fuzz("llama", 2, 0)


def test_fuzz_catches_padding_that_overwrites_the_text(monkeypatch):
    right = StageGraphs._pack

    def overwriting(self, packing, positions_l, *rows):
        packed = right(self, packing, positions_l, *rows)
        packing.unpack(packed)["slots_P"][len(positions_l) :] = 0
        return packed

    monkeypatch.setattr(StageGraphs, "_pack", overwriting)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        for seed in range(3):
            fuzz("llama", 2, seed)


def test_results_of_a_step_survive_the_next_one():
    controller = Controller("llama", 1, 0)
    (stage,) = controller.target.stages
    stage.cache = stage_cache.StageCache(())
    stage.graphs = StageGraphs(stage)
    controller.target.prefill(torch.tensor(controller.committed))
    outputs, copies = [], []
    for _ in range(3):
        controller.inject()
        outputs.append(stage.forward(controller.slots[0], taps=(2,)))
        copies.append((outputs[-1].hidden.clone(), outputs[-1].taps[2].clone()))
    for output, (hidden, tapped) in zip(outputs, copies, strict=True):
        assert torch.equal(output.hidden, hidden) and torch.equal(output.taps[2], tapped)


def test_few_sizes_are_recorded():
    assert [padded_rows(n) for n in (1, 2, 3, 4, 5, 16, 17, 64)] == [1, 2, 4, 4, 8, 16, 32, 64]
    controller = fuzz("llama", 1, 1)
    sizes = {rows for (rows, *_), *_ in controller.target.stages[0].graphs._graphs}
    assert sizes <= {1, 2, 4, 8, "move"}


def test_long_segments_go_layer_by_layer(monkeypatch):
    monkeypatch.setattr(stage_graphs, "MAX_ROWS", 2)
    controller = fuzz("llama", 2, 2)
    sizes = {rows for (rows, *_), *_ in controller.target.stages[0].graphs._graphs}
    assert sizes <= {1, 2, "move"}
