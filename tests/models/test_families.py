"""Test target families: every schedule decodes each one exactly; heads train and export.

``python tests/models/test_families.py`` prints a table with all checks.
"""

import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers as hf
from decode_runs import SMALL, SimulatedSource, engine_for, greedy_reference, plain_text
from family_runs import FAMILIES, HALF, LENGTH, PROMPT, SAMPLED, model_of
from staged_targets import (
    NUM_LAYERS,
    SIZES,
    VOCAB,
    Controller,
    chain_segment,
    random_ids,
    roughen,
    run,
)
from tiny_drafts import make_head
from train_runs import World, losses_on_one_batch, make_world

from pipedraft.models import families
from pipedraft.models import target as target_module
from pipedraft.models.exchange.export import export
from pipedraft.models.families import check_target
from pipedraft.models.stages import stage_layers
from pipedraft.models.target import StagedTarget, capture_hidden, load_target
from pipedraft.models.target_part import load_target_part
from pipedraft.models.transformer.decoder import LayerPositions
from pipedraft.models.transformer.stage_cache import additive_mask

TOLERANCE = 2e-5
QUICK = {"spd": {}, "flowspec": {"tree": SMALL}}
MICRO_BATCHES = {"pipeinfer": {}, "ssd": {"draft_tokens": 3}}
TREES = dict.fromkeys(("eagle", "naive_pp", "pruned_pp"), {"tree": SMALL})
LAYERS = {"pipedec": {"tree_width": 3}, "ppsd": {}}
LOCAL = {**QUICK, **TREES, "flowspec_continued": {}, **MICRO_BATCHES, **LAYERS}


# -- checks: each returns how many numbers or texts it compared, and how many differ ---------------


def count(pairs) -> tuple[int, int]:
    pairs = [*pairs]
    return len(pairs), sum(not torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in pairs)


def stages_compute_the_models_forward(name: str) -> tuple[int, int]:
    """Compare three stages with the model, in full and row by row, past the window."""
    model, ids = model_of(name), random_ids(40)
    target = StagedTarget(model, 3)
    reference_TV = model(ids[None], use_cache=False).logits[0]
    logits_V, _ = target.prefill(ids[:17], chunk_rows=7)
    rows = [logits_V]
    for size in [5, 1, 1, 3] + [1] * 13:
        start = 17 + target.stages[0].num_speculative
        rows += target.logits(run(target, chain_segment(target, ids[start:][:size])).hidden)
    return count(zip(rows, reference_TV[16:], strict=True))


def trees_and_keeps_equal_each_path(name: str) -> tuple[int, int]:
    """Keep and drop rows in random trees; compare each row's logits with its own path."""
    compared = 0
    for seed in range(2):
        controller = Controller(name, 3, seed, model_of(name).config._attn_implementation)
        controller.fuzz(num_steps=24)
        compared += controller.num_compared
    return compared, 0


def texts_of(name: str, ways: dict[str, dict], **options) -> tuple[int, int]:
    model, wrong = model_of(name), 0
    greedy = greedy_reference(model, PROMPT, 2 * LENGTH)
    expected = plain_text(model, PROMPT, max_new_tokens=LENGTH, **options)
    if not options:
        assert expected == greedy[:LENGTH]
    for schedule, settings in ways.items():
        source = SimulatedSource(model, PROMPT, 0.6, text=[*PROMPT, *expected, *greedy[LENGTH:]])
        engine = engine_for(
            model,
            source=source,
            schedule=schedule,
            num_stages=3,
            max_new_tokens=LENGTH,
            **options,
            **settings,
        )
        wrong += engine.decode(PROMPT).token_ids != expected
    return len(ways), wrong


def files_and_parts(name: str, folder: Path) -> tuple[int, int]:
    """Compare a target read from its files, whole and in two parts, with the one in memory."""
    model, ids = model_of(name), random_ids(20)
    model.save_pretrained(folder)
    expected_TV = model(ids[None], use_cache=False).logits[0]
    whole = load_target(str(folder))
    found = StagedTarget(whole, 2)
    own_V, _ = found.prefill(ids)
    ends = [dict(has_embedding=True, has_head=False), dict(has_embedding=False, has_head=True)]
    halves = [range(NUM_LAYERS // 2), range(NUM_LAYERS // 2, NUM_LAYERS)]
    first, last = (
        StagedTarget(load_target_part(str(folder), layers=half, **end), 2)
        for half, end in zip(halves, ends, strict=True)
    )
    positions = torch.arange(len(ids))
    hidden_TH, _ = first.stages[0].prefill(ids, positions)
    hidden_TH, _ = last.stages[1].prefill(hidden_TH, positions)
    return count([(own_V, expected_TV[-1]), (last.logits(hidden_TH[-1:])[0], expected_TV[-1])])


def packed_states(name: str, folder: Path) -> tuple[int, int]:
    """Compare training states for packed and separate texts, and index 0 to L for both."""
    model, ids, lengths = model_of(name), random_ids(30), [17, 13]
    layers = range(NUM_LAYERS + 1)
    packed = capture_hidden(model, ids[None], layers, lengths)
    apart = [capture_hidden(model, part[None], layers) for part in ids.split(lengths)]
    _, staged = StagedTarget(model, 2).prefill(ids[:17], layers)
    pairs = [(packed[x][0], torch.cat([part[x][0] for part in apart])) for x in layers]
    return count(pairs + [(staged[x], apart[0][x][0]) for x in layers])


HEADS = ("eagle3", "spd")


def heads_train(name: str, folder: Path, kinds=HEADS) -> tuple[int, int]:
    """Some steps on one batch lower the loss; the head decodes the target's output."""
    world, wrong = world_of(name, folder), 0
    target = load_target(str(world.target))
    for kind in kinds:
        trainer = world.trainer(kind, folder / kind)
        losses = losses_on_one_batch(trainer, 4, 4)
        assert all(map(math.isfinite, losses)), losses
        draft = trainer.objective.draft.eval().requires_grad_(False)
        options = {"schedule": "spd" if kind == "spd" else "eagle", "max_new_tokens": LENGTH}
        engine = engine_for(target, draft=draft, num_stages=2, **options)
        is_right = engine.decode(PROMPT).token_ids == greedy_reference(target, PROMPT, LENGTH)
        wrong += min(losses) == losses[0] or not is_right
    return len(kinds), wrong


def exports_name_the_target(name: str, folder: Path) -> tuple[int, int]:
    """Check the fields that engines match: verifier architecture, layer sizes, feature layers."""
    model = model_of(name)
    model.save_pretrained(folder / "target")
    head = make_head(load_target(str(folder / "target")), feature_layers=(1, 2, 3))
    object.__setattr__(head.reference, "name", str(folder / "target"))
    (folder / "head").mkdir()
    head.save(folder / "head")
    export(folder / "head", "speculators", folder / "vllm")
    export(folder / "head", "sglang", folder / "sglang")
    vllm, sglang = (
        json.loads((folder / x / "config.json").read_text()) for x in ("vllm", "sglang")
    )
    layer = vllm["transformer_layer_config"]
    found = {
        "architectures": vllm["speculators_config"]["verifier"]["architectures"],
        "layers": vllm["eagle_aux_hidden_state_layer_ids"],
        "hidden_size": layer["hidden_size"],
        "vocab_size": layer["vocab_size"],
        "model_type": layer["model_type"],
        "sglang": sglang["architectures"],
    }
    expected = {
        "architectures": [type(model).__name__],
        "layers": list(head.config.feature_layers),
        "hidden_size": SIZES["hidden_size"],
        "vocab_size": VOCAB,
        "model_type": "llama",
        "sglang": ["LlamaForCausalLMEagle3"],
    }
    return len(expected), sum(found[key] != expected[key] for key in expected)


def world_of(name: str, folder: Path) -> World:
    """Return a family's world: conversations, a tokenizer, and a target with its vocabulary."""
    world = make_world(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(world.target)
    config = FAMILIES[name]()
    config.get_text_config().vocab_size = len(tokenizer)
    torch.manual_seed(0)
    roughen(hf.AutoModelForCausalLM.from_config(config)).save_pretrained(world.target)
    return world


FIRST = {
    "forward": stages_compute_the_models_forward,
    "trees and Keeps": trees_and_keeps_equal_each_path,
    "greedy": lambda name: texts_of(name, QUICK),
    "sampled": lambda name: texts_of(name, QUICK, **SAMPLED),
}
WITH_FILES = {
    "files": files_and_parts,
    "packing": packed_states,
    "export": exports_name_the_target,
}
EVERY = {
    "greedy, all schedules": lambda name: texts_of(name, LOCAL),
    "sampled, all schedules": lambda name: texts_of(name, LOCAL, **SAMPLED),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_decoded_exactly(name):
    for check, function in FIRST.items():
        number, mismatches = function(name)
        assert number and not mismatches, (check, number, mismatches)


FAULTS = {
    "granite": ("embed", lambda embedding, config, ids: embedding(ids)),
    "gemma2": ("finish_logits", lambda config, logits_lV: logits_lV),
    "gemma3": ("LayerPositions", lambda decoder: OnePosition(decoder)),
    "olmo3": ("additive_mask", lambda *mask, window, **more: additive_mask(*mask, None, **more)),
}


class OnePosition(LayerPositions):
    """Known-bad positions: full attention uses the rotation of the windowed layers."""

    def __call__(self, hidden_1lH, positions_l, kinds, length=None):
        one = super().__call__(hidden_1lH, positions_l, HALF, length)[HALF[0]]
        return dict.fromkeys(kinds, one)


@pytest.mark.parametrize("name", FAULTS)
def test_a_stage_that_computes_like_another_family_is_noticed(name, monkeypatch):
    attribute, fault = FAULTS[name]
    module = target_module if attribute == "finish_logits" else stage_layers
    monkeypatch.setattr(module, attribute, fault)
    monkeypatch.setattr(target_module, "check_target", lambda *given: None)  # it would refuse
    assert stages_compute_the_models_forward(name)[1] > 0
    if name == "olmo3":  # the others' faults change logits, but no greedy token of this target
        with pytest.raises(AssertionError):
            texts_of(name, QUICK)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_read_packed_and_exported(name, tmp_path):
    for check, function in WITH_FILES.items():
        number, mismatches = function(name, tmp_path / check)
        assert number and not mismatches, (check, number, mismatches)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "granite", "deepseek_v3"])
def test_heads_train_on_a_family(name, tmp_path):
    assert heads_train(name, tmp_path) == (len(HEADS), 0)


@pytest.mark.all
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_decodes_a_family_and_heads_train_on_it(name, tmp_path):
    for check, function in EVERY.items():
        number, mismatches = function(name)
        assert number and not mismatches, (check, number, mismatches)
    assert heads_train(name, tmp_path) == (len(HEADS), 0)


# -- refusals ---------------------------------------------------------------------------------

REFUSED = {
    "gpt2": "its decoder has no ModuleList named layers",
    "opt": "its decoder has no Module named norm",
    "cohere": "its logits are more than those of its LM head after its final norm",
    "emu3": "transformers has no causal language model of its text part alone",
    "falcon_h1": "its decoder has no Module named norm",
    "gemma4_unified": "its layers also need shared_kv_states",
    "granitemoehybrid": "a small copy of it does not run in transformers .* only contain Linear",
    "zaya": "no KeepRows drops rows of its layers of kind hybrid",
    "deepseek_v32": "no KeepRows drops rows of its layers of kind indexed_attention",
    "minimax": "its layers do not run on a stage's cache .* 'get_linear_cache'",
    "nanochat": "its final norm has no weight",
    "t5": "transformers has no causal language model of it",
}
WRONG = {
    "granite": ("embed", lambda embedding, config, ids: embedding(ids), "changes hidden states"),
    "gemma2": ("finish_logits", lambda config, logits_lV: logits_lV, "its logits are more"),
    "olmo3": (
        "layer_kinds",
        lambda config: ("full_attention",) * config.num_hidden_layers,
        "layers of kind full_attention see other rows",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_by_what_it_lacks(model_type):
    with pytest.raises(ValueError, match=f"cannot be cut into stages: {REFUSED[model_type]}"):
        check_target(hf.AutoConfig.for_model(model_type), "a/model")


@pytest.mark.parametrize("name", WRONG)
def test_a_difference_from_transformers_forward_is_refused(name, monkeypatch):
    part, mutant, said = WRONG[name]
    monkeypatch.setattr(families, part, mutant)
    monkeypatch.setattr(families, "_lacks", {})
    with pytest.raises(ValueError, match=said):
        check_target(FAMILIES[name](), name)


def main() -> None:
    """Print the table: family, and compared and differing counts for each check."""
    hf.utils.logging.set_verbosity_error()
    with_files = {**WITH_FILES, "heads": heads_train}
    print("family", *FIRST, *EVERY, *with_files, sep=" | ")
    for name in sys.argv[1:] or FAMILIES:
        cells = [function(name) for function in (FIRST | EVERY).values()]
        for function in with_files.values():
            with TemporaryDirectory() as folder:
                cells.append(function(name, Path(folder)))
        print(name, *(f"{number}, {wrong}" for number, wrong in cells), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
