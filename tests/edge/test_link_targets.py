"""Targets of every family across a link, also at rotary crossings, and on devices of their own."""

import gc
from itertools import product

import pytest
from decode_runs import plain_text
from family_runs import FAMILIES, LENGTH, PROMPT, SAMPLED, model_of
from link_runs import run_session, simulate
from pretended_device import pretended_cuda
from rotary_runs import PROMPTS as CROSSING
from rotary_runs import QUICK, expected_of, target_of
from tiny_drafts import make_draft, noisy_copy
from tiny_models import tiny_llama

from pipedraft.eval.edge.methods import METHODS, decode
from pipedraft.inference.edge.target_session import SharedTarget
from pipedraft.inference.sources import make_source
from pipedraft.models.speed.cuda_graphs import Graphs

LINKED = [name for name, method in METHODS.items() if not method.caveat]
LONG_PROMPT = [7, 3, 9, 3] * 17  # more rows than a graph takes
NEW_TOKENS = 6
KEPT = {
    "test_a_draft_and_a_target_across_a_link_have_devices_of_their_own": 2,
    "test_links_cross_as_generate_does": 1,
}


def linked_texts(name: str, **options) -> tuple[int, int]:
    """Compare methods that decode across a link, with the target's noisy copy."""
    model = model_of(name)
    expected = plain_text(model, PROMPT, max_new_tokens=LENGTH, **options)
    rule = {"rule": options.pop("verifier")} if options else {}
    simulation = simulate(model, noisy_copy(model), max_new_tokens=LENGTH, **options, **rule)
    # With sampling, a method's own rule draws other tokens, from the same distribution.
    names = [x for x in LINKED if not (options and METHODS[x].has_own_rule)]
    texts = [decode(METHODS[x], simulation, PROMPT, prompt_index=0) for x in names]
    return len(texts), sum(x.result.token_ids != expected for x in texts)


@pytest.mark.all
@pytest.mark.parametrize("name", FAMILIES)
def test_every_method_decodes_a_family(name):
    for options in ({}, SAMPLED):
        number, wrong = linked_texts(name, **options)
        assert number and not wrong


@pytest.mark.parametrize("name", QUICK)
def test_links_cross_as_generate_does(name):
    model = target_of(name)
    simulation = simulate(model, noisy_copy(model), max_new_tokens=LENGTH)
    for prompt, method in product(list(CROSSING.values())[:1], LINKED):
        found = decode(METHODS[method], simulation, prompt, prompt_index=0).result.token_ids
        assert found == expected_of(name, tuple(prompt))[:LENGTH], method


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", ["stop_and_wait", "pearl", "picospec"])
def test_a_draft_and_a_target_across_a_link_have_devices_of_their_own(plan, temperature):
    with pretended_cuda():
        target, draft = tiny_llama().to("cuda:1"), make_draft(tiny_llama()).to("cuda:0")
        settings = {"plan": plan, "temperature": temperature, "max_new_tokens": NEW_TOKENS}
        result, _ = run_session(SharedTarget(target), make_source(draft), LONG_PROMPT, **settings)
    assert len(result.token_ids) == NEW_TOKENS


def test_graphs_are_recorded_once_for_successive_sessions(monkeypatch):
    keys, right = [], Graphs._make

    def record(self, packed, rows, compute):
        keys.append((id(self), len(packed)))
        return right(self, packed, rows, compute)

    monkeypatch.setattr(Graphs, "_make", record)
    with pretended_cuda():
        target, source = tiny_llama().to("cuda:0"), make_source(make_draft(tiny_llama()))
        for _ in range(2):
            settings = {"plan": "stop_and_wait", "max_new_tokens": NEW_TOKENS}
            run_session(SharedTarget(target), source, LONG_PROMPT[:4], **settings)
            gc.collect()  # the simulated link and its session refer to each other
        assert keys and len(keys) == len(set(keys))
