"""Drafts that share the target's LM head: not trained, not saved, and restored at loading."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipedraft.models import load_draft
from pipedraft.models.exchange.hub import fill_upload
from pipedraft.models.target import load_target

METHODS = {
    "spd": {"features": "listed", "depth_layers": "[[2],[2,4]]"},
    "ppsd": {"num_stages": 2},
    "eagle3": {"num_steps": 2},
}


@pytest.fixture(scope="module", params=METHODS)
def run(request, world, tmp_path_factory):
    """Train for four steps; return the trainer, and the network's folder."""
    folder = tmp_path_factory.mktemp(request.param)
    options = METHODS[request.param] | {"share_head": True, "draft_vocab_size": 60}
    options |= {"teacher_vocabulary": "draft"}
    trainer = world.trainer(
        request.param, folder, **{f"model__{name}": value for name, value in options.items()}
    )
    trainer.run()
    return trainer, folder / "best"


def test_it_is_neither_trained_nor_saved_and_comes_back(run, world):
    trainer, folder = run
    draft, target = trainer.objective.draft, load_target(str(world.target))
    rows_UH = target.get_output_embeddings().weight[draft.draft_ids]
    assert torch.equal(draft.lm_head.weight, rows_UH)
    assert not draft.lm_head.weight.requires_grad
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = load_draft(str(folder), target)
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(loaded.lm_head.weight, rows_UH)


def test_a_run_goes_on_with_it(run, world, tmp_path):
    trainer, _ = run
    changes = {f"model__{n}": x for n, x in METHODS[trainer.config.method].items()}
    changes |= {"model__share_head": True, "model__draft_vocab_size": 60, "max_steps": 2}
    first = world.trainer(trainer.config.method, tmp_path, **changes)
    first.run()
    again = world.trainer(trainer.config.method, tmp_path, **changes)
    again.restore()
    assert again.progress.step == 2
    for name, value in first.objective.state_dict().items():
        assert torch.equal(again.objective.state_dict()[name], value), name


def test_an_lm_head_in_its_file_is_refused(run, world, tmp_path):
    folder = run[1]
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(60, 64)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"lm_head\.weight is .*unexpected"):
        load_draft(str(tmp_path), load_target(str(world.target)))


def test_training_leaves_out_what_the_draft_vocabulary_lacks_and_validation_counts_it(run):
    trainer = run[0]
    window = next(trainer.windows())
    assert trainer.optimize(window)["mass_outside"] == 0
    assert 0 < trainer.evaluate()["mass_outside"] < 1


def test_a_teacher_of_the_draft_vocabulary_has_the_same_gradients(world, tmp_path):
    """p restricted and renormalized is the softmax of the restricted logits."""
    gradients = []
    for teacher in ("target", "draft"):
        torch.manual_seed(0)
        options = {"model__draft_vocab_size": 60, "model__teacher_vocabulary": teacher}
        trainer = world.trainer("spd", tmp_path / teacher, **options)
        batch = next(trainer.windows())[0]
        trainer.objective(batch, trainer.generator(0)).loss.backward()
        gradients.append([p.grad for p in trainer.objective.parameters() if p.grad is not None])
    for whole, restricted in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, restricted, rtol=1e-4, atol=1e-6)


def test_half_precision_halves_the_file_and_nothing_else(run, world, tmp_path):
    folder = run[1]
    half = tmp_path / "half"
    half.mkdir()
    fill_upload(half, folder, repo="user/name", is_half=True)
    assert {x.name for x in half.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    target = load_target(str(world.target))
    whole, rounded = load_draft(str(folder), target), load_draft(str(half), target)
    assert (tmp_path / "half/config.json").read_text() == (folder / "config.json").read_text()
    for name, value in whole.state_dict().items():
        found = rounded.state_dict()[name]
        assert found.dtype == value.dtype
        exact = value if name in ("draft_ids", "lm_head.weight") else value.half().to(value.dtype)
        assert torch.equal(found, exact), name
    sizes = [(f / "model.safetensors").stat().st_size for f in (folder, tmp_path / "half")]
    assert sizes[1] < 0.6 * sizes[0]


def test_a_weight_beyond_half_precision_is_refused_by_name(run, tmp_path):
    folder = run[1]
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] = 1e5
    (tmp_path / "head").mkdir()
    save_file(weights, tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"norm\.weight reaches 1e\+05, fp16 65504"):
        fill_upload(tmp_path, tmp_path / "head", repo="user/name", is_half=True)
