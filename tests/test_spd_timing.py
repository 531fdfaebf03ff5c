"""SPD with the states after a step: what the module reads, what it costs, and the same text."""

import pytest
import torch
from conftest import tiny_llama, tiny_qwen3
from decode_runs import (
    PROMPTS,
    PlainTokenizer,
    RemembersText,
    decode_exactly,
    distribution_p_value,
    engine_for,
    friendly_module,
    sampling_target,
)
from tiny_drafts import make_head, make_module

from pipedraft.inference.clock import CostModel
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.sources.spd import SPDSource
from pipedraft.models.target import capture_hidden

OUTPUT = {"schedule": "spd", "timing": "output_states"}


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("make_target", "num_stages", "query"),
    [(tiny_llama, 1, "newest"), (tiny_llama, 4, "all"), (tiny_qwen3, 3, "newest")],
)
def test_greedy_text_equals_transformers_greedy(make_target, num_stages, query, width):
    target = make_target(layers=4, vocab=16)
    module = make_module(target, num_stages=num_stages, num_layers=1, query=query).float()
    options = {"num_stages": num_stages, "tree_width": width, "max_new_tokens": 24}
    engine = engine_for(target, draft=module, **OUTPUT, **options)
    for prompt in PROMPTS:
        decode_exactly(engine, prompt)


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
    config = DecodeConfig.of(num_stages=4, max_new_tokens=24, **OUTPUT)
    engine = Engine(target, PlainTokenizer(), config, module, source=source)
    engine.decode(PROMPTS[2])
    # Depth 1 is of no row before the newest, which are asked with their embedding; n is committed.
    assert source.depths_seen == {0, 2, 3}


def test_the_check_notices_states_of_the_other_timing():
    target = tiny_llama(layers=4, vocab=16).double()
    module = make_module(target, num_stages=4, num_layers=1)
    config = DecodeConfig.of(num_stages=4, max_new_tokens=24, **OUTPUT)
    source = Checked(module, target, lead=0)
    with pytest.raises(AssertionError, match="not close"):
        Engine(target, PlainTokenizer(), config, module, source=source).decode(PROMPTS[2])


def test_the_stages_wait_for_the_module_at_every_step():
    """S = L' L / (Ls n + L), as for PPSD."""
    target = tiny_llama(layers=4, vocab=16)
    module = make_module(target, num_stages=4, num_layers=2).float()
    result = engine_for(target, draft=module, num_stages=4, **OUTPUT).decode(PROMPTS[1])
    length = 4 * result.num_tokens / result.num_steps
    speedup = result.virtual_time_autoregressive / result.virtual_time
    assert speedup == pytest.approx(length * 4 / (2 * 4 + 4))


def test_the_timing_is_for_speculation_modules_under_spd():
    with pytest.raises(ValueError, match="timing: schedule 'eagle' has no such setting .*spd"):
        DecodeConfig.of(schedule="eagle", timing="output_states", cost=CostModel())
    target = tiny_llama(layers=4, vocab=16)
    with pytest.raises(ValueError, match="timing: .* needs a speculation module, .* 'eagle3'"):
        engine_for(target, draft=make_head(target), num_stages=2, **OUTPUT)
