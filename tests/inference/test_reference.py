"""The page with plain transformers gives the engine's tokens, in the engine's number of steps."""

import pytest
import torch
from decode_runs import PROMPTS, engine_for
from tiny_models import tiny_llama

from pipedraft.inference.reference import speculate
from pipedraft.inference.rules.random import KeyedRandom
from pipedraft.models.heads.language_model import LanguageModelDraft

NUM_NEW = 24
WAYS = {
    "spd": ({"schedule": "spd"}, None),
    "pipedec": ({"schedule": "pipedec", "tree_width": 1}, None),
    "eagle": ({"schedule": "eagle", "tree": "chain:3"}, 3),
}


@pytest.fixture(scope="module")
def models():
    """A target, and a draft that agrees with it often enough to be accepted."""
    target, draft = tiny_llama(vocab=16), tiny_llama(vocab=16)
    draft.load_state_dict(target.state_dict())
    torch.manual_seed(1)
    with torch.no_grad():
        draft.lm_head.weight += 0.5 * draft.lm_head.weight.std() * torch.randn(16, 32)
    return target, draft


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("name", WAYS)
def test_the_engine_agrees_with_the_page(models, name, num_stages, temperature):
    target, draft = models
    options, length = WAYS[name]
    rule = {"verifier": "rejection"} if temperature else {}
    engine = engine_for(
        target, draft=LanguageModelDraft(draft, target), num_stages=num_stages, seed=5,
        temperature=temperature, max_new_tokens=NUM_NEW, **options, **rule,
    )  # fmt: skip
    accepted = []
    for index, prompt in enumerate(PROMPTS):
        result = engine.decode(prompt, prompt_index=index)
        with torch.inference_mode():
            tokens, equivalent_length = speculate(
                target, draft, prompt, num_new=NUM_NEW, num_stages=num_stages, length=length,
                temperature=temperature, uniform=KeyedRandom(5, index).uniform,
            )  # fmt: skip
        assert result.token_ids == tokens
        assert result.equivalent_acceptance_length == pytest.approx(equivalent_length)
        accepted += result.round_lengths
    assert len(set(accepted)) > 2, "both long and short rounds were seen"
