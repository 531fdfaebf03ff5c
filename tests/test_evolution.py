"""Targets that were fine-tuned: adapters trained by the loop, and what FlexSpec's copies allow."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tiny_drafts import evolved, make_draft
from train_runs import World, assert_equal_weights, logged, run_until, train, weights

from pipedraft.cli import UsageError
from pipedraft.models import __main__ as command
from pipedraft.models import load_draft
from pipedraft.models.flexspec import FlexSpec
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.models.target_part import out_of_scope
from pipedraft.train import language_model
from pipedraft.train.language_model import (
    PROJECTIONS,
    LanguageModelConfig,
    LanguageModelObjective,
    LoRAConfig,
)
from pipedraft.train.log import flop_counter

LAST = 3
LAST_MAPS = [
    *(f"model.layers.{LAST}.self_attn.{name}" for name in PROJECTIONS[:4]),
    *(f"model.layers.{LAST}.mlp.{name}" for name in PROJECTIONS[4:]),
]


# -- the scope ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([f"model.layers.{i}" for i in range(LAST)], []),
        (["model.embed_tokens"], ["model.embed_tokens"]),
        (["model.norm"], ["model.norm"]),
        (["lm_head"], ["lm_head"]),
        ([LAST_MAPS[4]], [LAST_MAPS[4]]),
        (
            ["lm_head", f"model.layers.{LAST}.input_layernorm", "model.layers.0"],
            [f"model.layers.{LAST}.input_layernorm", "lm_head"],
        ),
    ],
    ids=str,
)
def test_a_changed_copy_is_named(base, tmp_path, parts, found):
    evolved(tiny_llama(), *parts).save_pretrained(tmp_path)
    assert out_of_scope(str(base), str(tmp_path)) == found


def test_the_smallest_change_of_one_weight_is_enough(base, tmp_path):
    target = tiny_llama()
    weight = target.model.layers[LAST].mlp.down_proj.weight
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    target.save_pretrained(tmp_path)
    assert out_of_scope(str(base), str(tmp_path)) == [f"model.layers.{LAST}.mlp.down_proj"]


def test_a_tied_head_changes_with_the_embedding(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        target = tiny_llama()
        target.config.tie_word_embeddings = True
        target.tie_weights()
        target.model.embed_tokens.weight.mul_(1 + seed)
        target.save_pretrained(tmp_path / name)
    found = out_of_scope(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found == ["model.embed_tokens", "lm_head"]


def test_a_setting_of_the_last_block_is_named(base, tmp_path):
    target = tiny_llama()
    target.config.rope_parameters["rope_theta"] = 77.0
    target.save_pretrained(tmp_path)
    assert out_of_scope(str(base), str(tmp_path)) == ["config.rope_parameters"]


def test_another_depth_is_no_version_of_the_target(base, tmp_path):
    tiny_llama(layers=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 3 layers, the base 4; give"):
        out_of_scope(str(base), str(tmp_path))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"layers_to_transform": [0, 1, 2]}, []),
        ({}, LAST_MAPS),
        ({"layers_to_transform": [1, 3], "target_modules": ["o_proj"]}, [LAST_MAPS[3]]),
        ({"target_modules": ["lm_head"]}, ["lm_head"]),
        ({"layers_to_transform": [0], "modules_to_save": ["lm_head"]}, ["lm_head"]),
        ({"target_modules": ["embed_tokens"]}, ["model.embed_tokens"]),
    ],
    ids=str,
)
def test_an_adapter_is_judged_by_what_it_targets(base, tmp_path, options, found):
    """Also when it changes nothing yet, as a new one does."""
    config = LoraConfig(r=2, **{"target_modules": list(PROJECTIONS), **options})
    get_peft_model(tiny_llama(), config).save_pretrained(tmp_path)
    assert out_of_scope(str(base), str(tmp_path)) == found


def test_an_adapter_that_cannot_be_judged_is_refused(base, tmp_path):
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(tiny_llama(), prompts).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'prompt_embeddings' .*PROMPT_TUNING.* give an adapter"):
        out_of_scope(str(base), str(tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="no loadable adapter_model.safetensors"):
        out_of_scope(str(base), str(tmp_path))


def test_the_command_says_it_by_its_status(base, tmp_path, monkeypatch, capsys):
    evolved(tiny_llama(), "model.layers.1").save_pretrained(tmp_path / "in")
    evolved(tiny_llama(), "model.norm", "lm_head").save_pretrained(tmp_path / "out")
    for name, status in (("in", None), ("out", 1)):
        words = ["models", "scope", "--base", str(base), "--target", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", words)
        if status is None:
            command.main()
            assert capsys.readouterr().out.startswith("in scope: ")
        else:
            with pytest.raises(SystemExit) as stop:
                command.main()
            assert stop.value.code == status
            assert capsys.readouterr().out == "model.norm\nlm_head\n"
    with pytest.raises(ValueError, match="--base: no folder"):
        out_of_scope(str(tmp_path / "absent"), str(base))


# -- training adapters --------------------------------------------------------------------------


def tuning(world: World, /, lora_options: dict | None, **changes) -> dict:
    """Changes of a run that tunes the world's target."""
    shape = ("tokenizer", "hidden_size", "intermediate_size", "num_layers", "num_heads")
    changes = {f"model__{name}": None for name in shape} | changes
    if lora_options is not None:
        changes["model__lora"] = json.dumps({"rank": 3, "alpha": 9.0, **lora_options})
    return {"model__init_from": world.target, "optim__lr": 3e-2, **changes}


@pytest.fixture(scope="module")
def tuned(world, tmp_path_factory) -> dict[str, Path]:
    """Finished folders: adapters before the last layer, in all layers, and everything trained."""
    folders = {}
    for name, options in (("before_last", {}), ("all", {"layers": "all"}), ("full", None)):
        out = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            train(world.arguments("language_model", out, **tuning(world, options)), patch)
        folders[name] = out / "best"
    return folders


def logits(model) -> torch.Tensor:
    ids_BT = torch.arange(30).view(2, 15)
    with torch.no_grad():
        return model(input_ids=ids_BT).logits


def assert_merged_right(world, folder) -> None:
    """The merged model, and the base with its adapters beside it, are one function."""
    adapted = PeftModel.from_pretrained(load_target(str(world.target)), folder / "adapter")
    expected = logits(adapted)
    torch.testing.assert_close(logits(load_target(str(folder))), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, logits(load_target(str(world.target))), atol=0.1)


@pytest.mark.parametrize("name", ["before_last", "all"])
def test_the_merged_model_computes_what_the_adapters_do(world, tuned, name):
    assert_merged_right(world, tuned[name])


def test_a_merge_with_another_scale_is_noticed(world, tmp_path, monkeypatch):
    right = language_model.merge_lora

    def mutant(model, state):
        half = {n: x / 2 if ".lora_B." in n else x for n, x in state.items()}
        return right(model, half)

    monkeypatch.setattr("pipedraft.train.language_model.merge_lora", mutant)
    train(world.arguments("language_model", tmp_path, **tuning(world, {})), monkeypatch)
    with pytest.raises(AssertionError):
        assert_merged_right(world, tmp_path / "best")


def test_adapters_before_the_last_layer_keep_the_copies_bit_for_bit(world, tuned):
    before, after = weights(world.target), weights(tuned["before_last"])
    assert before.keys() == after.keys()
    adapted = {name for name in after if not torch.equal(before[name], after[name])}
    maps = {name.replace(f".{LAST}.", ".{}.") + ".weight" for name in LAST_MAPS}
    assert adapted == {name.format(layer) for name in maps for layer in range(LAST)}
    targets = [load_target(str(folder)) for folder in (world.target, tuned["before_last"])]
    assert FlexSpec.fingerprint(targets[0]) == FlexSpec.fingerprint(targets[1])
    assert out_of_scope(str(world.target), str(tuned["before_last"])) == []
    assert out_of_scope(str(world.target), str(tuned["before_last"] / "adapter")) == []


def test_what_reaches_the_copies_is_named_after_training(world, tuned):
    assert out_of_scope(str(world.target), str(tuned["all"])) == LAST_MAPS
    assert out_of_scope(str(world.target), str(tuned["all"] / "adapter")) == LAST_MAPS
    found = out_of_scope(str(world.target), str(tuned["full"]))
    assert set(found) >= {*LAST_MAPS, "model.embed_tokens", "model.norm", "lm_head"}
    assert not (tuned["full"] / "adapter").exists()


def test_a_draft_loads_within_the_scope_and_elsewhere_by_exception_alone(world, tuned, tmp_path):
    make_draft(load_target(str(world.target))).save(tmp_path)
    load_draft(str(tmp_path), load_target(str(tuned["before_last"])))
    for name in ("all", "full"):
        target = load_target(str(tuned[name]))
        with pytest.raises(ValueError, match="(anchor|hash): .* give that target"):
            load_draft(str(tmp_path), target)
        assert load_draft(str(tmp_path), target, allow_evolved=True).draft_type == "flexspec"
    with pytest.raises(ValueError, match="vocab_size: .* != 64"):
        load_draft(str(tmp_path), tiny_llama(), allow_evolved=True)


def test_a_stopped_run_of_adapters_ends_bit_for_bit_as_an_unbroken_one(
    world, tmp_path, monkeypatch
):
    changes = tuning(world, {}, max_steps=5, save_every_steps=2)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(world.arguments("language_model", whole, **changes), monkeypatch)
    trainer = world.trainer("language_model", stopped, **changes)
    run_until(trainer, 3)
    train(world.arguments("language_model", stopped, **changes), monkeypatch)
    assert logged(stopped) == logged(whole)
    assert_equal_weights(weights(stopped / "best"), weights(whole / "best"))
    adapters = [
        (folder / "best/adapter/adapter_model.safetensors").read_bytes()
        for folder in (whole, stopped)
    ]
    assert adapters[0] == adapters[1]


def objective_of(world, **options) -> LanguageModelObjective:
    config = LanguageModelConfig(init_from=str(world.target), **options)
    return LanguageModelObjective(config, load_tokenizer(str(world.target)))


def test_only_adapters_are_trained_and_cost_less(world):
    batch = {
        "input_ids": torch.arange(20)[None],
        "loss_mask": torch.ones(1, 20),
        "lengths": torch.tensor([20]),
    }
    whole = objective_of(world)
    small = objective_of(world, lora=LoRAConfig(rank=2, modules=["q_proj", "down_proj"]))
    names = [name for name, p in small.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * LAST and all(".lora_" in name for name in names)
    # q_proj is 32 x 32, down_proj 32 x 64; A and B of each
    trained = sum(p.numel() for p in small.parameters() if p.requires_grad)
    assert trained == LAST * 2 * (32 + 32 + 32 + 64)
    losses, flops = [], []
    for objective in (whole, small):
        with flop_counter() as counter:
            loss = objective(batch, torch.Generator()).loss
            loss.backward()
        losses.append(loss)
        flops.append(counter.get_total_flops())
    assert torch.equal(*losses)
    # About two of three products of the frozen weights, and all of attention.
    assert 0.5 * flops[0] < flops[1] < 0.8 * flops[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model__lora": '{"rank": 0}'}, "model.lora.rank: 0 is below 1"),
        ({"model__lora": '{"alpha": 0}'}, "model.lora.alpha: 0.0 is not positive"),
        ({"model__lora": '{"modules": []}'}, "model.lora.modules: .* leave it out"),
        ({"model__lora": '{"layers": "last"}'}, "model.lora"),
        ({"model__lora": '{"modules": ["qkv"]}'}, "'qkv' is no linear map .* known: down_proj"),
        ({"model__init_from": None, "model__tokenizer": "x"}, "without model.init_from"),
        ({"model__card": "absent.md"}, "model.card: 'absent.md' cannot be read"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_field_value_and_fix(world, tmp_path, options, words):
    with pytest.raises((ValueError, UsageError), match=words):
        world.trainer("language_model", tmp_path, **tuning(world, {}) | options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({f"model__{name}": value}, f"model.{name}: {value}; give at least 1")
            for name in ("hidden_size", "intermediate_size", "num_heads", "num_key_value_heads")
            for value in (0, -3)
        ),
        ({"model__num_layers": 0}, "model.num_layers: 0; give at least 1"),
        ({"model__rope_theta": 0}, "model.rope_theta: 0.0; give at least 1"),
        ({"model__num_heads": 3}, "model.num_heads: 3 does not cut model.hidden_size 32"),
        ({"model__num_heads": 32}, "model.num_heads: 32 .* one even size"),
        ({"model__num_key_value_heads": 4}, "model.num_key_value_heads: 4 does not divide .* 2"),
        ({"model__max_positions": 8}, "model.max_positions: 8 is below data.max_length 64"),
    ],
    ids=str,
)
def test_a_shape_that_is_none_is_refused_before_training(world, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        world.trainer("language_model", tmp_path, **options)


def test_a_missing_peft_is_named(world, tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"model.lora: needs peft; pip install"):
        world.trainer("language_model", tmp_path, **tuning(world, {}))
