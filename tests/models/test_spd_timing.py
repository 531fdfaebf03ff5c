"""SPD with the states after a step: the module's input, its cost, and the same output."""

from types import SimpleNamespace

import pytest
import torch
from decode_runs import (
    PROMPTS,
    RemembersText,
    distribution_p_value,
    engine_for,
    friendly_module,
    sampling_target,
)
from spd_runs import decode_like_training
from tiny_drafts import make_head, make_module
from tiny_models import tiny_llama

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.sources.spd import SPDSource
from pipedraft.models.target import capture_hidden
from pipedraft.train.batch import Batch
from pipedraft.train.methods import SPDTrainConfig
from pipedraft.train.spd import SPDObjective

OUTPUT = {"schedule": "spd", "timing": "output_states"}
TRAINED = {"timing": "output_states"}


@pytest.mark.all
def test_a_sampled_chain_has_the_targets_distribution():
    target = sampling_target()
    module = friendly_module(target, num_stages=2, num_layers=1)
    assert distribution_p_value(target, module, temperature=1.0, **OUTPUT) > 1e-3


class Checked(RemembersText, SPDSource):
    """Compares the logits of every chain with a module that reads the whole text from scratch."""

    def __init__(self, draft, target, *, lead=1) -> None:
        super().__init__(draft, lead=lead)
        self.target, self.depths_seen = target, set()

    def deepest_logits(self, tree, features):
        found_QU = super().deepest_logits(tree, features)
        num_rows = len(tree)
        ids = torch.tensor([[*self.text[:-1], *tree.tokens]])
        taps = {layer: x[0] for layer, x in capture_hidden(self.target, ids, self.taps).items()}
        first = len(self.text) - 1
        caches = self.draft.new_caches()
        self.draft.extend(caches, {layer: x[:first] for layer, x in taps.items()}, 0)
        distances = list(range(num_rows - 1, -1, -1))
        depths = [distance + 1 if distance else 0 for distance in distances]
        self.depths_seen |= set(depths)
        expected_QU = self.draft.propose(
            caches,
            {layer: x[first:] for layer, x in taps.items()},
            depths=depths,
            positions=torch.arange(first, first + num_rows),
            visible_RR=torch.ones(num_rows, num_rows, dtype=torch.bool).tril(),
        )
        torch.testing.assert_close(found_QU, expected_QU, rtol=1e-8, atol=1e-8)
        return found_QU


@pytest.mark.parametrize("query", ["newest", "all"])
def test_rows_in_flight_are_read_one_stage_deeper(query):
    target = tiny_llama(layers=4, vocab=16).double()
    module = make_module(target, num_stages=4, num_layers=2, query=query)
    source = Checked(module, target)
    options = {"num_stages": 4, "max_new_tokens": 24, **OUTPUT}
    engine_for(target, draft=module, source=source, **options).decode(PROMPTS[2])
    # No row before the newest has depth 1: the newest use their embedding. n is committed.
    assert source.depths_seen == {0, 2, 3}


def test_the_check_notices_states_of_the_other_timing():
    target = tiny_llama(layers=4, vocab=16).double()
    module = make_module(target, num_stages=4, num_layers=1)
    options = {"num_stages": 4, "max_new_tokens": 24, **OUTPUT}
    source = Checked(module, target, lead=0)
    with pytest.raises(AssertionError, match="not close"):
        engine_for(target, draft=module, source=source, **options).decode(PROMPTS[2])


@pytest.mark.parametrize("query", ["newest", "all"])
@pytest.mark.parametrize(
    "features",
    [{}, {"features": "anchors", "anchors": (4, 8)}],
    ids=["paper", "anchors"],
)
def test_a_module_for_output_states_decodes_the_rows_it_was_trained_on(features, query):
    # After a step the oldest row is committed: n - 1 are in flight.
    assert decode_like_training(query=query, **features, **TRAINED) == {1, 2, 3}


@pytest.mark.parametrize("mutant", [{"shallower": 1}, {"more": 1}], ids=["a stage less", "fuller"])
def test_the_comparison_notices_training_rows_of_before_the_step(mutant):
    with pytest.raises(AssertionError, match="not close"):
        decode_like_training(mutant, **TRAINED)


def test_a_module_for_output_states_reads_no_others():
    target = tiny_llama(layers=4, vocab=16)
    module = make_module(target, num_stages=2, num_layers=1, **TRAINED).float()
    for schedule in ("spd", "pipedec"):
        with pytest.raises(ValueError, match="^timing: 'input_states', .* give .*output_states"):
            engine_for(target, draft=module, num_stages=2, schedule=schedule)
    with pytest.raises(ValueError, match=r"^model.timing: .* give model.num_stages 2 or more"):
        make_module(target, num_stages=1, **TRAINED)


def test_training_draws_and_evaluates_the_fills_of_after_a_step():
    target = tiny_llama(layers=4)
    config = SPDTrainConfig(num_stages=4, num_layers=1, **TRAINED)
    no_data = SimpleNamespace(report=SimpleNamespace(to_dict=dict))
    objective = SPDObjective(config, target, target_name="tiny", revision=None, data=no_data)
    batch = Batch.padded([{"input_ids": [1, 2], "loss_mask": [1, 1]}] * 60, 0)
    _, fills = objective._fill(batch, torch.Generator().manual_seed(0))
    assert set(fills) == {1, 2, 3} and 15 < fills.count(3) < 45
    assert objective.evaluation_options() == {"occupancies": range(1, 4)}


def test_the_stages_wait_for_the_module_at_every_step():
    """S = L' L / (Ls n + L), as for PPSD."""
    target = tiny_llama(layers=4, vocab=16)
    module = make_module(target, num_stages=4, num_layers=2).float()
    engine = engine_for(target, draft=module, num_stages=4, max_new_tokens=24, **OUTPUT)
    result = engine.decode(PROMPTS[1])
    length = 4 * result.num_tokens / result.num_steps
    speedup = result.virtual_time_autoregressive / result.virtual_time
    assert speedup == pytest.approx(length * 4 / (2 * 4 + 4))


def test_the_timing_is_for_speculation_modules_under_spd():
    with pytest.raises(ValueError, match="timing: schedule 'eagle' has no such setting .*spd"):
        DecodeConfig.of(schedule="eagle", timing="output_states", cost=CostModel())
    target = tiny_llama(layers=4, vocab=16)
    with pytest.raises(ValueError, match="timing: .* needs a speculation module, .* 'eagle3'"):
        engine_for(target, draft=make_head(target), num_stages=2, **OUTPUT)
