"""FlexSpec: decoding equals training, the frozen parts, and fitting targets."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from decode_runs import (
    CHAIN,
    NEW_TOKENS,
    PROMPTS,
    PUBLISHED,
    SMALL,
    WAYS,
    PlainTokenizer,
    RemembersText,
    assert_sampled_like_the_target,
    attentive_llama,
    count_tests,
    decode_exactly,
    distribution_p_value,
    engine_for,
    greedy_reference,
    sampling_target,
    see_siblings,
    way_name,
)
from inline_ranks import decode_both
from staged_targets import SIZES, tiny
from tiny_drafts import KINDS, evolved, kind_name, make_draft
from tiny_models import tiny_llama, tiny_qwen3
from transformers import GraniteConfig, GraniteForCausalLM

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.rules.sampled import DraftToken, RejectionVerifier
from pipedraft.inference.schedules.pipeinfer import PipeInfer
from pipedraft.inference.sources import default_schedule
from pipedraft.inference.sources.flexspec import FlexSpecSource
from pipedraft.models import load_draft
from pipedraft.models.heads.configs import FlexSpecConfig
from pipedraft.models.heads.draft import TargetReference, read_description
from pipedraft.models.heads.flexspec import FlexSpec, check_anchor
from pipedraft.models.target import StagedTarget
from pipedraft.models.target_part import load_target_part
from pipedraft.models.transformer.layers import KeyValues, LayerConfig

LENGTH = 11


def teach(draft, texts) -> None:
    """Solve for a vocabulary projection that predicts about 3 in 4 tokens correctly."""
    states, labels = [], []
    for text in texts:
        states.append(draft(torch.tensor([text]))[0, :-1, -1].double())
        wrong = [(token + (at % 4 == 3)) % draft.target_vocab_size for at, token in enumerate(text)]
        labels.append(F.one_hot(torch.tensor(wrong[1:]), draft.target_vocab_size).double())
    states_MH, labels_MV = torch.cat(states), torch.cat(labels)
    gram_HH = states_MH.T @ states_MH + 1e-6 * torch.eye(states_MH.shape[1])
    solution_HV = torch.linalg.solve(gram_HH, states_MH.T @ labels_MV)
    draft.lm_head.weight.copy_(4 * solution_HV.T)


# -- the draft ----------------------------------------------------------------------------------


def decode_rows(draft, ids_T, cuts) -> torch.Tensor:
    """Compute states [T, E, H] for a text read in parts, with the decode-time code."""
    config = draft.config
    caches = [KeyValues() for _ in range(config.num_readings * config.num_layers)]
    states_TEH = ids_T.new_zeros(1, config.num_readings, 32, dtype=draft.lm_head.weight.dtype)
    for start, stop in zip((0, *cuts), (*cuts, len(ids_T)), strict=True):
        out = draft.rows(
            ids_T[start:stop],
            positions_R=torch.arange(start, stop),
            caches=caches,
            visible_RC=torch.ones(stop - start, stop, dtype=torch.bool).tril(start),
            known_QEH=states_TEH,
            before_R=torch.arange(start, stop),
        )
        states_TEH = torch.cat([states_TEH, out])
    return states_TEH[1:]


@pytest.mark.parametrize("make_target", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_rows_in_training_equal_rows_in_decoding(make_target, kind):
    target = make_target().double()
    draft = make_draft(target, **kind).double()
    ids_T = torch.randint(0, target.config.vocab_size, (LENGTH,))
    expected = draft(ids_T[None])[0]
    torch.testing.assert_close(
        decode_rows(draft, ids_T, (5, 6, 7)), expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("make_target", [tiny_llama, tiny_qwen3])
def test_the_anchor_computes_what_the_targets_last_block_does(make_target):
    """Reference: transformers runs the block alone, as a one-layer model from the same family."""
    target, alone = make_target().double(), make_target(layers=1, seed=3).double()
    alone.model.layers[0].load_state_dict(target.model.layers[-1].state_dict())
    alone.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    alone.model.norm.load_state_dict(target.model.norm.state_dict())
    ids_BT = torch.randint(0, target.config.vocab_size, (2, LENGTH))
    normed = torch.nn.Identity(), alone.model.norm
    with torch.no_grad():
        for preset, norm in zip(("paper", "practical"), normed, strict=True):
            draft = make_draft(target, preset=preset).double()
            alone.model.norm = norm
            if preset == "practical":  # the stem's own norm comes before the block
                alone.model.embed_tokens.weight.copy_(draft.stem(draft.embedding.weight))
            block_BTH = alone.model(ids_BT).last_hidden_state
            expected = draft.mlp[2](F.silu(draft.mlp[0](block_BTH)))
            expected = expected + block_BTH * (preset == "practical")
            # transformers' norms are in float32.
            torch.testing.assert_close(draft(ids_BT)[:, :, -1], expected, rtol=1e-4, atol=1e-5)


def test_it_starts_as_the_anchor_on_plain_embeddings():
    target = tiny_llama()
    reference = TargetReference(name="tiny", fingerprint=FlexSpec.fingerprint(target))
    layer = LayerConfig.from_target(target.config)
    for source in ("none", "self"):
        draft = FlexSpec(FlexSpecConfig(feature_source=source), layer, reference)
        draft.initialize(target)
        assert torch.equal(draft.lm_head.weight, target.lm_head.weight)
        states_BTEH = draft(torch.arange(8)[None])
        assert torch.equal(states_BTEH[:, :, 0], states_BTEH[:, :, -1])
    paper = FlexSpec(FlexSpecConfig(preset="paper"), layer, reference)
    paper.initialize(target)
    assert not torch.allclose(paper.lm_head.weight, target.lm_head.weight, atol=0.1)


def test_the_cost_of_a_forward_counts_what_is_computed():
    target = tiny_llama(layers=8, hidden=32)
    staged = StagedTarget(target, 4)
    layer = sum(p.numel() for p in target.model.layers[-1].parameters())
    costs = [make_draft(target, **kind).relative_cost(staged) for kind in KINDS]
    paper, stem, deep = (2 * 32**2, 3 * 32**2 + 32, 3 * 32**2 + 32 + layer)
    wide = (4 * 32**2 + 32, 4 * 32**2 + 32 + layer)
    expected = [paper, paper, stem, deep, *wide]
    readings = [1, 1, 1, 1, 2, 2]
    for cost, own, times in zip(costs, expected, readings, strict=True):
        assert math.isclose(cost, times * (layer + own) / (8 * layer))


# -- decoding -----------------------------------------------------------------------------------


class Checked(RemembersText, FlexSpecSource):
    """Checks each tree row: reading its whole path from scratch gives the same logits."""

    def __init__(self, draft) -> None:
        self.expected: dict[tuple[int, ...], torch.Tensor] = {}
        super().__init__(draft)

    def _logits(self, tree, rows):
        logits_QU = super()._logits(tree, rows)
        for row, logits_U in zip(rows, logits_QU, strict=True):
            whole = tuple(self.text_at(tree, row))
            if whole not in self.expected:
                states_TEH = self.draft(torch.tensor([whole]))[0]
                self.expected[whole] = self.draft.logits(states_TEH[-1])
            assert torch.allclose(logits_U, self.expected[whole], rtol=1e-9, atol=1e-9)
        return logits_QU


CHECKED_WAYS = [
    *({"schedule": "spd", "tree_width": width} for width in (1, 4)),
    {"schedule": "eagle", "tree": CHAIN},
    {"schedule": "eagle", "tree": SMALL},
    {"schedule": "flowspec_continued", **dict(expansion_depth=2, step_tokens=2)},
    {"schedule": "flowspec", "tree": SMALL, **PUBLISHED},
    {"schedule": PipeInfer(draft_tokens=3, branches=2)},
]


def decode_texts(engine, prompts, texts) -> list:
    """Decode each prompt exactly; a text begins with its prompt."""
    pairs = zip(prompts, texts, strict=True)
    return [decode_exactly(engine, prompt, text[len(prompt) :]) for prompt, text in pairs]


def decode_checked(kind, way) -> int:
    target = attentive_llama(4, vocab=8).double()
    prompts = ([5], [1, 2, 7, 3, 4, 3])  # the second text must not see the first one's rows
    texts = [[*prompt, *greedy_reference(target, prompt, 12)] for prompt in prompts]
    draft = make_draft(target, **kind).double()
    teach(draft, texts)
    source = Checked(draft)
    engine = engine_for(target, source=source, num_stages=4, max_new_tokens=12, **way)
    tested, accepted = count_tests(decode_texts(engine, prompts, texts))
    assert 5 < accepted < tested
    return len(source.expected)


@pytest.mark.parametrize("kind", KINDS[3:5], ids=kind_name)
@pytest.mark.parametrize("way", CHECKED_WAYS, ids=way_name)
def test_draft_tokens_are_those_of_their_paths_read_from_scratch(kind, way):
    assert decode_checked(kind, way) > 20


def forget_the_moved_state(monkeypatch) -> None:
    right = FlexSpecSource._keep_rows

    def mutant(source, keep):
        state = source._text_state
        right(source, keep)
        source._text_state = state

    monkeypatch.setattr(FlexSpecSource, "_keep_rows", mutant)


def read_moved_rows_again(monkeypatch) -> None:
    right = FlexSpecSource._keep_rows

    def mutant(source, keep):
        right(source, keep)
        source._num_taken_in = 0

    monkeypatch.setattr(FlexSpecSource, "_keep_rows", mutant)


def place_rows_one_too_far(monkeypatch) -> None:
    right = FlexSpec.rows

    def mutant(draft, tokens_R, *, positions_R, **options):
        late = positions_R + (options["caches"][0].num_rows > 0)
        return right(draft, tokens_R, positions_R=late, **options)

    monkeypatch.setattr(FlexSpec, "rows", mutant)


def feed_back_the_own_state(monkeypatch) -> None:
    right = FlexSpec.rows

    def mutant(draft, tokens_R, *, known_QEH, before_R, **options):
        own_R = torch.arange(len(tokens_R)) + len(known_QEH)
        return right(draft, tokens_R, known_QEH=known_QEH, before_R=own_R, **options)

    monkeypatch.setattr(FlexSpec, "rows", mutant)


@pytest.mark.parametrize(
    "mutate",
    [
        see_siblings,
        forget_the_moved_state,
        read_moved_rows_again,
        place_rows_one_too_far,
        feed_back_the_own_state,
    ],
)
def test_wrong_rows_are_noticed(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        decode_checked({"feature_source": "self"}, CHECKED_WAYS[1])


@pytest.mark.parametrize(("kind", "num_stages"), [(KINDS[0], 1), (KINDS[2], 3)])
def test_greedy_text_equals_transformers_greedy(kind, num_stages):
    """The ways above, on the shortest prompt and the longest; and other static trees."""
    target = (tiny_qwen3 if num_stages == 3 else tiny_llama)(vocab=16)
    draft, prompts = make_draft(target, **kind), [PROMPTS[0], PROMPTS[3]]
    texts = [[*prompt, *greedy_reference(target, prompt)] for prompt in prompts]
    teach(draft, texts)
    for way in (*CHECKED_WAYS[1:], *WAYS[2:7]):
        engine = engine_for(
            target, draft=draft, num_stages=num_stages, max_new_tokens=NEW_TOKENS, **way
        )
        tested, accepted = count_tests(decode_texts(engine, prompts, texts))
        assert 0 < accepted < tested, way


@pytest.mark.parametrize("way", CHECKED_WAYS[1::2], ids=way_name)
def test_both_backends_agree(way):
    target = tiny_llama(vocab=16)
    decode_both(target, PROMPTS[::3], draft=make_draft(target), num_stages=2, **way)


def test_a_draft_token_that_becomes_text_is_not_computed_again():
    """With everything accepted a round takes one forward per draft token. The first forward reads
    the bonus token and the uncontinued draft token before it."""
    target = tiny_llama(vocab=16)
    draft = make_draft(target)
    rows = []
    forward = FlexSpec.rows
    source = FlexSpecSource(draft)

    def counted(tokens_R, **options):
        rows.append(len(tokens_R))
        return forward(draft, tokens_R, **options)

    draft.rows = counted
    config = DecodeConfig.of(schedule="eagle", tree=CHAIN, num_stages=2, max_new_tokens=40)
    result = Engine(target, PlainTokenizer(), config, source=source).decode([3, 1, 4])
    assert source.num_forwards == len(rows) == 3 * len(result.round_lengths)
    draft_tokens_that_left = sum(3 - length for length in result.round_lengths if length < 3)
    assert sum(rows) <= 3 + result.num_tokens + draft_tokens_that_left + 3


SAMPLED_CHAIN = {"schedule": "eagle", "tree": CHAIN, "verifier": "rejection"}
SAMPLED_WAYS = [
    pytest.param(SAMPLED_CHAIN, marks=pytest.mark.all, id="chain"),
    pytest.param({"schedule": "eagle", "tree": SMALL}, id="tree"),
]


@pytest.mark.parametrize("way", SAMPLED_WAYS)
def test_sampled_text_has_the_targets_distribution(way):
    target = sampling_target()
    assert_sampled_like_the_target(target, make_draft(target), **way)


def test_the_distribution_test_catches_a_draft_token_that_was_not_drawn_from_its_q(monkeypatch):
    propose = RejectionVerifier.propose

    def most_likely(*arguments, **options):
        q_V = propose(*arguments, **options).q_V
        return DraftToken(int(q_V.argmax()), q_V)

    monkeypatch.setattr(RejectionVerifier, "propose", most_likely)
    target = sampling_target()
    assert distribution_p_value(target, make_draft(target), samples=60, **SAMPLED_CHAIN) < 1e-6


# -- checkpoints and evolving targets -----------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target, and the folder of its draft."""
    target, folder = tiny_llama(), tmp_path_factory.mktemp("draft")
    make_draft(target, feature_source="self", stem_layers=1).save(folder)
    return target, folder


def test_a_saved_draft_loads_without_its_target(saved):
    target, folder = saved
    made = make_draft(target, feature_source="self", stem_layers=1)
    loaded = FlexSpec.load(folder, read_description(folder))
    assert loaded.config == made.config and default_schedule(loaded.draft_type) == "eagle"
    ids_BT = torch.arange(12).view(2, 6)
    assert torch.equal(loaded.logits(loaded(ids_BT)), made.logits(made(ids_BT)))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("part", "field"),
    [
        *(("model.layers.3." + part, "anchor") for part in ("mlp.up_proj", "input_layernorm")),
        ("model.embed_tokens", "hash"),
        ("model.norm", "hash"),
        ("lm_head", "hash"),
    ],
)
def test_a_target_whose_anchor_has_changed_is_refused_by_name(saved, part, field):
    target, folder = saved
    changed = evolved(target, part)
    was, now = FlexSpec.fingerprint(target)[field], FlexSpec.fingerprint(changed)[field]
    with pytest.raises(ValueError, match=f"target: .* {field}: {was} != {now}; give that target"):
        load_draft(str(folder), changed)


def test_the_fingerprint_survives_the_dtype_and_a_checkpoint_without_one_is_refused(
    saved, tmp_path
):
    target, folder = saved
    half = evolved(target).bfloat16()
    assert FlexSpec.fingerprint(half) == FlexSpec.fingerprint(half.float())
    description = read_description(folder)
    del description["target"]["fingerprint"]["anchor"]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="anchor: None != "):
        load_draft(str(tmp_path), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_controller_that_does_not_hold_the_last_block_checks_it_all_the_same(
    saved, tmp_path, dtype
):
    target, folder = saved
    for name, model in (("same", target), ("changed", evolved(target, "model.layers.3"))):
        model.save_pretrained(tmp_path / name)
        part = load_target_part(
            str(tmp_path / name), layers=range(2), has_embedding=True, has_head=True, dtype=dtype
        )
        if name == "same":
            assert load_draft(str(folder), part).draft_type == "flexspec"
        else:
            with pytest.raises(ValueError, match="anchor: "):
                load_draft(str(folder), part)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_5"])
def test_a_last_block_of_another_kind_is_refused(name):
    with pytest.raises(
        ValueError, match="target: its last block .* has other weights .*dense attention"
    ):
        check_anchor(tiny(name))
    check_anchor(tiny_qwen3())
    factor = GraniteConfig(**SIZES, residual_multiplier=0.4)
    with pytest.raises(ValueError, match="computes more than attention and MLP"):
        check_anchor(GraniteForCausalLM(factor).eval())


def test_a_quantized_last_block_is_refused():
    target = tiny_llama()
    layer = target.model.layers[-1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="target_quantization: mlp.up_proj.weight .* torch.int8"):
        check_anchor(target)
