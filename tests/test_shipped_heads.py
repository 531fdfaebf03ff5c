"""The heads that ship accept what they accepted: a change that makes them agree less is found."""

import pytest
import torch
from conftest import REPOSITORY
from decode_runs import engine_for

from pipedraft.eval.tasks import encode_turn, load_task
from pipedraft.models import load_draft
from pipedraft.models.target import load_target, load_tokenizer

ASSETS = REPOSITORY / "assets"
FLOORS = [
    ("spd_n4", {"schedule": "spd", "num_stages": 4}, 2.28),
    ("spd_n4", {"schedule": "spd", "num_stages": 4, "tree_width": 4}, 2.85),
    ("eagle3", {"schedule": "eagle", "tree": "chain:7"}, 2.9),
    ("eagle3", {"schedule": "flowspec_continued", "num_stages": 4}, 3.48),
]
"""The head, how it is decoded with, and 0.975 of its L' when it was shipped."""


@pytest.fixture(scope="module")
def world():
    target = load_target(str(ASSETS / "target"))
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    prompts = [
        encode_turn(tokenizer, prompt, [])
        for name in ("mt_bench", "gsm8k", "humaneval")
        for prompt in load_task(name, limit=2)
    ]
    return target, prompts


def acceptance_length(world, draft, way) -> float:
    """Pooled L' of greedy outputs, 32 tokens each."""
    target, prompts = world
    engine = engine_for(target, draft=draft, max_new_tokens=32, **way)
    results = [engine.decode(ids) for ids in prompts]
    tokens = sum(result.num_tokens for result in results)
    return results[0].num_stages * tokens / sum(result.num_steps for result in results)


@pytest.mark.parametrize(("head", "way", "floor"), FLOORS)
def test_a_head_accepts_as_much_as_it_did(world, head, way, floor):
    draft = load_draft(str(ASSETS / "heads" / head), world[0])
    found = acceptance_length(world, draft, way)
    assert found > floor


@pytest.mark.parametrize(("head", "way", "floor"), [FLOORS[0], FLOORS[2]])
def test_the_floor_finds_perturbed_weights(world, head, way, floor):
    draft = load_draft(str(ASSETS / "heads" / head), world[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
    assert acceptance_length(world, draft, way) < floor
