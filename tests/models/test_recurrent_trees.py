"""Token trees on a target with recurrent layers: each row starts from its parent's state."""

from functools import cache

import pytest
import torch
import transformers as hf
from decode_runs import (
    PROMPTS,
    WAYS,
    decode_exactly,
    engine_for,
    friendly_module,
    greedy_reference,
    plain_text,
    prompts_of,
    simulate,
    simulated_texts,
    way_name,
)
from inline_ranks import decode_both
from staged_targets import FAMILIES, SIZES, Controller, continue_the_row_before, random_ids, tiny
from tiny_drafts import make_head

from pipedraft.models.target import KeepRows, Segment, StagedTarget
from pipedraft.models.transformer.stage_cache import StageCache

LAYERED = [
    {"schedule": "spd", "tree_width": 2},
    {"schedule": "spd", "tree_width": 2, "timing": "output_states"},
    {"schedule": "ppsd", "tree_width": 2},
    {"schedule": "pipeinfer", "draft_tokens": 4, "branches": 3},
    {"schedule": "pipeinfer", "branches": 2, "restart": True},
    {"schedule": "ssd", "draft_tokens": 3},
]
TREES = [way for way in WAYS if getattr(way.get("tree"), "kind", "dynamic") != "chain"] + LAYERED
LENGTH = 12


SAMPLED = {"temperature": 1.0, "verifier": "gumbel"}


@cache
def plain_sampled(*prompt):
    return plain_text(tiny("qwen3_5"), prompt, max_new_tokens=LENGTH, **SAMPLED)


def sampled_and_plain(way):
    prompts = prompts_of(TREES.index(way) + 1)
    texts = simulated_texts(tiny("qwen3_5"), LENGTH, prompts=prompts, **SAMPLED, **way)
    return texts, [plain_sampled(*prompt) for prompt in prompts]


@pytest.mark.parametrize(
    "acceptance", [0.6, *(pytest.param(rate, marks=pytest.mark.all) for rate in (0.0, 1.0))]
)
@pytest.mark.parametrize("way", TREES, ids=way_name)
def test_greedy_text_is_transformers(way, acceptance):
    """Pruning leaves some segments one row, and others none."""
    simulate(tiny("qwen3_5"), PROMPTS[2], acceptance, max_new_tokens=LENGTH, **way)


@pytest.mark.parametrize("way", TREES, ids=way_name)
def test_sampled_text_is_plain_decodings(way):
    found, plain = sampled_and_plain(way)
    assert found == plain


def test_the_texts_notice_a_row_that_continues_another_branch(monkeypatch):
    continue_the_row_before(monkeypatch)
    target = tiny("qwen3_5")
    with pytest.raises(AssertionError):
        for prompt in PROMPTS:
            simulate(target, prompt, 0.6, max_new_tokens=LENGTH, **LAYERED[0])
    found, plain = sampled_and_plain(LAYERED[0])
    assert found != plain


@pytest.mark.parametrize("kind", ["spd", "eagle3"])
def test_trained_drafts_read_the_states_of_branches(kind):
    target = tiny("qwen3_5")
    if kind == "spd":
        draft = friendly_module(target, num_stages=4, num_layers=1)
        ways = [{"schedule": "spd", "tree_width": width} for width in (4, "auto")]
    else:
        draft, ways = make_head(target, kind), WAYS[1:8:2]
    for way in ways:
        engine = engine_for(target, draft=draft, num_stages=4, max_new_tokens=LENGTH, **way)
        result = decode_exactly(engine, PROMPTS[2], greedy_reference(target, PROMPTS[2], LENGTH))
        assert result.num_drafted > result.num_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stages_of_a_cluster_keep_the_states_of_branches(temperature):
    target = tiny("qwen3_5")
    draft = friendly_module(target, num_stages=4, num_layers=1)
    way = {"schedule": "spd", "num_stages": 4, "tree_width": 4, "temperature": temperature}
    decode_both(target, PROMPTS[1:3], draft=draft, **way)


def test_siblings_pass_a_recurrent_layer_as_one_batch():
    (stage,) = StagedTarget(tiny("qwen3_5"), 1).stages
    stage.prefill(random_ids(5), torch.arange(5))
    calls = []
    layer = stage.layers[0]
    hook = layer.register_forward_hook(lambda _, inputs, out: calls.append(tuple(out.shape[:2])))
    root_and_four = torch.eye(5, dtype=torch.bool)
    root_and_four[:, 0] = True
    positions = torch.tensor([5, 6, 6, 6, 6])
    stage.forward(Segment(positions, root_and_four, ids=random_ids(5)))
    hook.remove()
    assert calls == [(1, 1), (4, 1)]
    held = stage.cache.num_bytes
    stage.keep(KeepRows((0, 3), 1))
    assert (stage.num_committed, stage.num_speculative) == (6, 1)
    assert stage.cache.num_bytes < held


# -- families whose one-row form changes the state in place, or whose layers keep no config --------

LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
LATENT = dict(kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
DELTA = LAYERS | LATENT | dict(linear_head_dim=8, linear_num_heads=4, num_key_value_heads=4)
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_token=2)
HYBRIDS = {
    "granite_hybrid": lambda: hf.GraniteMoeHybridConfig(
        **SIZES,
        **LAYERS,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "kimi_linear": lambda: hf.KimiLinearConfig(**SIZES | DELTA | EXPERTS, q_lora_rank=None),
    "bailing_hybrid": lambda: hf.BailingHybridConfig(
        **SIZES | DELTA | EXPERTS, head_dim=8, num_expert_group=1, topk_group=1
    ),
}
FEW = [LAYERED[0], {"schedule": "eagle", "tree": WAYS[1]["tree"]}, LAYERED[3]]


@cache
def hybrid(name: str) -> hf.PreTrainedModel:
    FAMILIES.setdefault(name, HYBRIDS[name])
    model = tiny(name)
    for weight_name, weight in model.named_parameters():  # long memories: a lost state matters
        for ending, value in (("dt_bias", -2.0), ("A_log", -3.0)):
            if weight_name.endswith(ending):
                weight.fill_(value)
    return model


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_decodes_what_transformers_generates(name):
    model = hybrid(name)
    controller = Controller(name, 3, 0)
    controller.fuzz(num_steps=24)
    assert controller.num_compared > 10
    for way in FEW:
        simulate(model, PROMPTS[2], 0.6, max_new_tokens=LENGTH, **way)


def test_a_state_that_is_handed_out_and_lost_is_noticed(monkeypatch):
    model = hybrid("granite_hybrid")
    remember = StageCache._remember

    def forgets_the_other(self, name, place, states):
        if name == "conv":
            remember(self, name, place, states)

    monkeypatch.setattr(StageCache, "_remember", forgets_the_other)
    with pytest.raises(AssertionError):
        for prompt in PROMPTS:
            simulate(model, prompt, 0.6, max_new_tokens=LENGTH, **FEW[0])
