"""--bitwise, and 8-bit weights: outputs equal the baseline's, as every row has the same bits."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from decode_runs import (
    CHAIN,
    PROMPTS,
    WAYS,
    SimulatedSource,
    assert_sampled_like_the_target,
    distribution_p_value,
    engine_for,
    friendly_module,
    plain_text,
    sampling_target,
    way_name,
)
from inline_ranks import connect_inline
from needs import NEEDS_KERNELS
from pretended_device import pretended_cuda
from staged_targets import chain_segment, tiny
from tiny_drafts import make_exit, make_head
from tiny_models import tiny_llama, tiny_mistral

from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.rules.filters import TokenFilters
from pipedraft.inference.rules.sampled import RULES, KeyedRandom
from pipedraft.models.speed.plain_layers import PlainLayers
from pipedraft.models.speed.rounded import round_draft, round_head, round_target, rounded_dtype
from pipedraft.models.stages.bitwise import ROWS
from pipedraft.models.stages.together import can_run_together
from pipedraft.models.target import StagedTarget
from pipedraft.models.transformer.decoder import PLAIN as PLAIN_FAMILIES
from pipedraft.models.transformer.stage_cache import KeepRows, Segment

TOKENS = 24
PROMPT = PROMPTS[2]
PLAIN = {"schedule": "autoregressive", "bitwise": True}
SPD_WAYS = [{"schedule": "spd"}, {"schedule": "spd", "tree_width": 3}]


@pytest.fixture(scope="module")
def target():
    """Target as wide as a processor's vectors; its logits are so close that rounding decides."""
    return tiny_llama(layers=4, hidden=64, vocab=1000).to(torch.bfloat16)


PARAMS = ["bfloat16", *(pytest.param(x, marks=NEEDS_KERNELS) for x in ("float16", "int8", "int4"))]


@pytest.fixture(scope="module", params=PARAMS)
def exact(request, target):
    """Return a target, and the options for equal bits."""
    if request.param == "bfloat16":
        return target, {"bitwise": True}
    rounded = tiny_llama(
        layers=4, hidden=128, vocab=1000
    )  # heads of 32 entries: whole layers by kernels
    round_target(rounded, getattr(torch, request.param))
    return rounded, {}


def decode(target, prompt, text, way, **options) -> list[int]:
    options |= {"num_stages": 4, "max_new_tokens": TOKENS}
    if way["schedule"] == "spd":
        base = tiny_llama(layers=4, hidden=target.config.hidden_size, vocab=1000)
        draft = friendly_module(base, num_stages=4, num_layers=1)
        if dtype := rounded_dtype(target):
            round_draft(draft, dtype)
        else:
            draft.to(torch.bfloat16)
        return engine_for(target, draft=draft, **way, **options).decode(prompt).token_ids
    source = SimulatedSource(target, prompt, 0.7, TOKENS, text=[*prompt, *text])
    return engine_for(target, source=source, **way, **options).decode(prompt).token_ids


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.all)])
@pytest.mark.parametrize("way", [*WAYS, *SPD_WAYS], ids=way_name)
def test_text_is_that_of_plain_decoding(exact, way, temperature):
    target, promise = exact
    options = {"temperature": temperature, "verifier": "match", "seed": 3} | promise
    expected = plain_text(target, PROMPT, max_new_tokens=TOKENS, **options)
    assert decode(target, PROMPT, expected, way, **options) == expected


@pytest.mark.parametrize("way", [SPD_WAYS[1], WAYS[0]], ids=way_name)
def test_processes_have_the_text_of_plain_decoding_in_one(exact, way):
    target, promise = exact
    expected = plain_text(target, PROMPT, max_new_tokens=TOKENS, **promise)
    found = decode(target, PROMPT, expected, way, connect=connect_inline, **promise)
    assert found == expected


def test_the_rows_of_a_prompt_have_the_same_bits_in_processes(target):
    """Known-bad: as many chunks as stages, with other sizes than in one process."""
    found = []
    for connect in (LocalPipeline, connect_inline):
        for is_on in (True, False):
            options = {"num_stages": 4, "max_new_tokens": TOKENS, "bitwise": is_on}
            engine = engine_for(target, schedule="autoregressive", connect=connect, **options)
            engine.open_pipeline(0)
            verifier = RULES["match"](0.0, KeyedRandom(0, 0), filters=TokenFilters())
            _, taps = engine.pipeline.prefill(torch.arange(200), (4,), verifier)
            found.append(taps[4])
    assert torch.equal(found[0], found[2]) and not torch.equal(found[1], found[3])


def test_without_it_some_texts_differ(target):
    """Rounding changes this target's outputs: otherwise the other tests would prove nothing."""
    num_different = 0
    for way in WAYS[:3]:
        for prompt in PROMPTS[1:]:
            expected = plain_text(target, prompt, max_new_tokens=TOKENS)
            num_different += decode(target, prompt, expected, way) != expected
    assert num_different


def test_text_of_a_draft_in_the_target_is_plain_decodings(target):
    draft = make_exit(target, num_stages=4).to(torch.bfloat16)
    options = {"bitwise": True, "max_new_tokens": TOKENS}
    expected = plain_text(target, PROMPT, **options)
    engine = engine_for(target, draft=draft, schedule="ppsd", num_stages=4, **options)
    assert engine.decode(PROMPT).token_ids == expected


@pytest.mark.parametrize("window", [None, 6])
def test_a_row_has_the_same_bits_beside_any_others(window):
    """One row alone, five or twenty together, and on a tree branch."""
    model = tiny_mistral(layers=2, hidden=64, vocab=100, sliding_window=window).to(torch.bfloat16)
    ids, prompt = torch.arange(1, 21), torch.arange(9)
    found = []
    for size in (1, 5, 20):
        target = StagedTarget(model, 2)
        target.set_bitwise(True)
        target.prefill(prompt)
        rows = []
        for part in ids.split(size):
            rows.append(forward(target, chain_segment(target, part)))
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    # Each row's sibling comes before it, and is no ancestor of anything.
    target.reset()
    target.prefill(prompt)
    both = torch.stack([ids + 30, ids], 1).flatten()
    own = torch.arange(40)
    visible = (own[:, None] == own) | ((own % 2 == 1) & (own < (own // 2 * 2)[:, None]))
    tree = Segment(positions=9 + own // 2, visible=visible, ids=both)
    assert torch.equal(forward(target, tree)[1::2], found[0])
    for stage in target.stages:  # and the kept rows continue the same text
        stage.keep(KeepRows(tuple(range(1, 20, 2)), 10))
    again = forward(target, chain_segment(target, ids[10:]))
    assert torch.equal(again, found[0][10:])


def forward(target: StagedTarget, segment: Segment) -> torch.Tensor:
    for stage in target.stages:
        segment = stage.forward(segment)
    assert segment.hidden is not None
    return target.logits(segment.hidden)


def test_a_target_without_one_shape_is_refused():
    for name in ("mixtral", "qwen3_5"):
        for connect in (LocalPipeline, connect_inline):
            engine = engine_for(tiny(name), num_stages=2, connect=connect, **PLAIN)
            with pytest.raises(ValueError, match=f"bitwise: targets of model_type '{name}"):
                engine.decode(PROMPT)
    StagedTarget(tiny(PLAIN_FAMILIES[0]), 2).set_bitwise(True)


def test_a_pass_on_a_gpu_has_the_one_row_of_plain_decodings(target):
    """Known-bad: 16 rows; on a real GPU their outputs differed from the baseline's."""
    sizes: list[int] = []
    with pretended_cuda():
        placed = deepcopy(target).to("cuda:0")
        expected = plain_text(placed, PROMPT, max_new_tokens=TOKENS, bitwise=True)
        query = placed.model.layers[0].self_attn.q_proj
        query.register_forward_pre_hook(lambda _, rows: sizes.append(rows[0].shape[1]))
        assert decode(placed, PROMPT, expected, WAYS[0], bitwise=True) == expected
    assert len(sizes) > TOKENS and set(sizes[1:]) == {1}, "the first is the prompt's"


def test_every_bitwise_product_has_one_row_count(target, monkeypatch):
    """Known-bad passes: without padding, and several sequences' rows in one."""
    counts, calls = set(), PlainLayers.calls

    def counted(layers, num_rows, **more):
        counts.add(num_rows)
        return calls(layers, num_rows, **more)

    monkeypatch.setattr(PlainLayers, "calls", counted)
    decode(target, PROMPT, [], SPD_WAYS[1], bitwise=True)
    assert counts == {ROWS, len(PROMPT)}  # every pipeline runs a prompt alike
    engine = engine_for(target, schedule="autoregressive", bitwise=True, num_stages=4)
    engine.open_pipeline(0)
    stage = engine.pipeline.target.stages[0]
    assert stage.is_bitwise and not can_run_together(stage)


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("way", SPD_WAYS, ids=way_name)
def test_a_rounded_draft_leaves_a_float32_targets_text(dtype, way):
    target = tiny_llama(layers=4, hidden=64, vocab=1000)
    draft = friendly_module(target, num_stages=4, num_layers=1)
    round_head(draft, dtype, target)
    assert rounded_dtype(draft) is getattr(torch, dtype)
    assert rounded_dtype(target) is None
    expected = plain_text(target, PROMPT, max_new_tokens=TOKENS)
    options = {"num_stages": 4, "max_new_tokens": TOKENS}
    result = engine_for(target, draft=draft, **way, **options).decode(PROMPT)
    assert result.token_ids == expected and result.num_drafted > 0


SAMPLED = {"schedule": "eagle", "tree": CHAIN, "verifier": "rejection"}


@pytest.mark.all
@NEEDS_KERNELS
def test_sampled_text_with_a_rounded_draft_has_the_targets_law():
    target = sampling_target()
    draft = make_head(target)
    round_head(draft, "int4", target)
    assert_sampled_like_the_target(target, draft, **SAMPLED)


@pytest.mark.all
@NEEDS_KERNELS
def test_a_test_against_other_probabilities_than_the_rounded_drafts_shows(monkeypatch):
    target = sampling_target()
    draft = make_head(target)
    round_head(draft, "int4", target)
    rule = RULES["rejection"]
    propose = rule.propose

    def mutant(*arguments, **options):
        drawn = propose(*arguments, **options)
        return replace(drawn, q_V=torch.full_like(drawn.q_V, 1 / len(drawn.q_V)))

    monkeypatch.setattr(rule, "propose", mutant)
    assert distribution_p_value(target, draft, **SAMPLED) < 1e-6


def test_a_drafts_dtype_is_checked(target):
    wide = tiny_llama(layers=4, hidden=64, vocab=1000)
    draft = friendly_module(wide, num_stages=4, num_layers=1)
    round_head(draft, "float32", wide)
    assert rounded_dtype(draft) is None
    with pytest.raises(ValueError, match="draft_dtype: 'int5' is no dtype here"):
        round_head(draft, "int5", wide)
    # This target computes in half precision: its states do not fit rounded weights' kernels.
    with pytest.raises(ValueError, match="draft_dtype: int8 needs a CPU, a target"):
        round_head(draft, "int8", target)
