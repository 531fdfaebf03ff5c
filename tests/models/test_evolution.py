"""Fine-tuned targets: edits allowed by FlexSpec's copies, and the training script."""

import json
from itertools import groupby
from pathlib import Path

import pyarrow
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from doc_commands import training_script
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from scripts import load_script
from tiny_drafts import evolved, make_draft
from tiny_models import REPOSITORY, tiny_llama
from train_runs import World, assert_equal_weights, weights

from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.data_recipes.table import Rows
from pipedraft.models import load_draft
from pipedraft.models.heads.flexspec import FlexSpec
from pipedraft.models.target import load_target, load_tokenizer

out_of_scope = load_script("benchmarks/retention.py").out_of_scope
LAST = 3
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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
    """A new adapter counts too, although it changes nothing yet."""
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


# -- training -----------------------------------------------------------------------------------


CONFIGS = sorted((REPOSITORY / "configs" / "target").glob("*.yaml"))
TINY = {"training.max_steps": 2, "training.per_device_train_batch_size": 1, "row_length": 64}
TINY |= {"training.eval_steps": 1, "training.save_steps": 1, "training.use_cpu": True}
TINY |= {"training.disable_tqdm": True, "data.valid_fraction": 0.1, "training.learning_rate": 1e-2}


@pytest.fixture(scope="module")
def script():
    with training_script() as module:
        yield module


def tune(script, world: World, config: Path, out: Path, **changes) -> Path:
    """Run the script on the world's data and target; return its finished folder."""
    settings = TINY | {"output_dir": out, "data.sources": json.dumps([{"path": str(world.data)}])}
    settings["data.cache_dir"] = world.folder / "cache"
    given = yaml.safe_load(config.read_text())
    settings |= {name: world.target for name in ("init_from", "tokenizer") if name in given}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    words = [f"--{key}={value}" for key, value in settings.items()]
    AcceleratorState._reset_state(reset_partial_state=True)
    script.train(script.read(["--config", str(config), *words]))
    return out / "best"


@pytest.fixture(scope="module")
def tuned(script, world, tmp_path_factory) -> dict[str, Path]:
    """Finished folders for every shipped configuration, by name."""
    small = {"vocab_size": 300, "shape__num_hidden_layers": 2}
    return {
        path.stem: tune(
            script,
            world,
            path,
            tmp_path_factory.mktemp(path.stem),
            **(small if path.stem == "tiny" else {}),
        )
        for path in CONFIGS
    }


def logits(model) -> torch.Tensor:
    ids_BT = torch.arange(30).view(2, 15)
    with torch.no_grad():
        return model(input_ids=ids_BT).logits


def test_every_configuration_makes_a_model_that_loads_as_a_target(tuned):
    for name, folder in tuned.items():
        model, tokenizer = load_target(str(folder)), load_tokenizer(str(folder))
        assert model.config.vocab_size == len(tokenizer), name
        assert torch.isfinite(logits(model)).all()
    assert load_target(str(tuned["tiny"])).config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ["evolve_lora_mild", "evolve_lora_all"])
def test_the_merged_model_computes_what_the_adapters_do(world, tuned, name):
    folder = tuned[name]
    adapted = PeftModel.from_pretrained(load_target(str(world.target)), folder / "adapter")
    expected = logits(adapted)
    torch.testing.assert_close(logits(load_target(str(folder))), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, logits(load_target(str(world.target))), atol=1e-3)


def test_adapters_before_the_last_layer_keep_the_copies_bit_for_bit(world, tuned):
    folder = tuned["evolve_lora_strong"]
    before, after = weights(world.target), weights(folder)
    assert before.keys() == after.keys()
    adapted = {name for name in after if not torch.equal(before[name], after[name])}
    maps = {name.replace(f".{LAST}.", ".{}.") + ".weight" for name in LAST_MAPS}
    assert adapted == {name.format(layer) for name in maps for layer in range(LAST)}
    targets = [load_target(str(place)) for place in (world.target, folder)]
    assert FlexSpec.fingerprint(targets[0]) == FlexSpec.fingerprint(targets[1])
    assert out_of_scope(str(world.target), str(folder)) == []
    assert out_of_scope(str(world.target), str(folder / "adapter")) == []


def test_what_reaches_the_copies_is_named_after_training(world, tuned):
    folder = tuned["evolve_lora_all"]
    assert out_of_scope(str(world.target), str(folder)) == LAST_MAPS
    assert out_of_scope(str(world.target), str(folder / "adapter")) == LAST_MAPS
    found = out_of_scope(str(world.target), str(tuned["evolve_full"]))
    assert set(found) >= {*LAST_MAPS, "model.embed_tokens", "model.norm", "lm_head"}
    assert not (tuned["evolve_full"] / "adapter").exists()


def test_a_draft_loads_within_the_scope_and_elsewhere_by_exception_alone(world, tuned, tmp_path):
    make_draft(load_target(str(world.target))).save(tmp_path)
    load_draft(str(tmp_path), load_target(str(tuned["evolve_lora_mild"])))
    for name in ("evolve_lora_all", "evolve_full"):
        target = load_target(str(tuned[name]))
        with pytest.raises(ValueError, match="(anchor|hash): .* give that target"):
            load_draft(str(tmp_path), target)
        assert load_draft(str(tmp_path), target, allow_evolved=True).draft_type == "flexspec"
    with pytest.raises(ValueError, match="vocab_size: .* != 64"):
        load_draft(str(tmp_path), tiny_llama(), allow_evolved=True)


@pytest.mark.parametrize(
    "name", [pytest.param("tiny_draft", marks=pytest.mark.all), "evolve_lora_strong"]
)
def test_a_run_that_was_stopped_ends_as_an_unbroken_one(script, world, tmp_path, name):
    """Muon's and AdamW's states, and adapters' states, come back from the checkpoint."""
    config = REPOSITORY / "configs" / "target" / f"{name}.yaml"
    constant = {"training__lr_scheduler_type": "constant"}
    whole = tune(script, world, config, tmp_path / "whole", **constant, training__max_steps=3)
    for steps in (2, 3):
        place = tmp_path / "stopped"
        stopped = tune(script, world, config, place, **constant, training__max_steps=steps)
    assert_equal_weights(weights(stopped), weights(whole))


def test_settings_that_contradict_each_other_are_refused(script):
    common = ["--config", str(REPOSITORY / "configs" / "target" / "evolve_lora_mild.yaml")]
    for word, said in (("--init_from=null", "shape, init_from: give one"),):
        with pytest.raises(ValueError, match=said):
            script.read([*common, word])


def test_rows_are_whole_documents_joined_with_separators(script):
    """A separator is a label after a text, but not after a conversation."""
    texts = [[i] * i for i in range(2, 20)]
    columns = {"input_ids": texts, "loss_mask": [[1] * len(ids) for ids in texts]}
    columns["source"] = ["chats" if len(ids) % 2 else "texts" for ids in texts]
    data = DataConfig(sources=[Source(path="chats"), Source(path="texts", kind="text")])
    config = script.TargetConfig(
        output_dir="", data=data, row_length=8, training={}, init_from=str(REPOSITORY)
    )
    rows = script.pack(Rows([pyarrow.RecordBatch.from_pydict(columns)]), config, 0)
    assert {len(row["input_ids"]) for row in rows[:-1]} == {8}
    ids = [token for row in rows for token in row["input_ids"]]
    mask = [label for row in rows for label in row["loss_mask"]]
    found = [list(run) for is_end, run in groupby(ids, lambda token: token == 0) if not is_end]
    assert sorted(found) == texts != found
    assert [m for t, m in zip(ids, mask, strict=True) if t == 0] == [1 - len(x) % 2 for x in found]
