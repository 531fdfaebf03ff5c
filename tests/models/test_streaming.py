"""Stream target weights from files to their final device: no process holds them all."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import memory_growth
import pytest
import torch
from command_processes import Process
from fork_server import forked, status_of
from memory_growth import ENDS, rank_of
from safetensors.torch import load_file, save_file
from staged_targets import FAMILIES, tiny
from tiny_models import tiny_llama
from torch.distributed.tensor import DTensor

from pipedraft.models import target_part
from pipedraft.models.target import load_target
from pipedraft.models.target_part import load_target_part
from pipedraft.train.launch import shard_target

WEIGHTS = "model.safetensors"


# -- equality -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "mixtral", "qwen3_moe", "qwen3_5", "qwen3_5_moe"]
)
def test_a_part_reads_its_own_tensors_alone_and_is_equal(name, tmp_path, monkeypatch):
    tiny(name).save_pretrained(tmp_path, max_shard_size="20KB")
    read, open_weights = set(), target_part.open_weights

    def noted(*arguments: Any) -> Any:
        file = open_weights(*arguments)
        return SimpleNamespace(get_slice=lambda key: read.add(key) or file.get_slice(key))

    monkeypatch.setattr(target_part, "open_weights", noted)
    whole = load_target(str(tmp_path)).state_dict()
    part = load_target_part(str(tmp_path), layers=[1, 2], **ENDS)
    for key, weight in part.state_dict().items():
        assert weight.is_meta == bool(re.search(r"layers\.[03]\.", key)), key
        assert weight.is_meta or torch.equal(weight, whole[key]), key
    assert not any(re.search(r"layers\.[03]\.", key) for key in read)
    assert len(read) == len({key for key in read if "layers." in key}) + 3 - ("tied" in name)


@pytest.mark.parametrize("name", FAMILIES)
def test_processes_read_parts_that_make_up_the_layers(name, tmp_path, monkeypatch):
    """Two nodes, three processes each; rows and experts do not divide evenly among them."""
    tiny(name).save_pretrained(tmp_path)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads of torch do not outlive a fork

    def read_part(rank: int) -> None:
        with rank_of(6, 3, rank, monkeypatch) as accelerator:
            target = load_target_part(str(tmp_path), layers=[3], **ENDS)
            shard_target(target, accelerator)
            state = target.state_dict()
            assert all(isinstance(x, DTensor) == (".layers." in key) for key, x in state.items())
            own = {
                k: x.to_local() if isinstance(x, DTensor) else x.clone() for k, x in state.items()
            }
            save_file(own, tmp_path / f"{rank}.part")

    # Processes, because torch remembers the place of a process among the others.
    started = [forked(partial(read_part, rank)) for rank in range(3, 6)]
    assert [status_of(process) for process in started] == [0, 0, 0]
    parts = [load_file(tmp_path / f"{rank}.part") for rank in range(3, 6)]
    for key, weight in load_target(str(tmp_path)).state_dict().items():
        found = [part[key] for part in parts]
        assert torch.equal(torch.cat(found) if ".layers." in key else found[0], weight), key


# -- refusals -------------------------------------------------------------------------------

Change = Callable[[dict[str, torch.Tensor]], Any]
BROKEN: dict[str, tuple[Change, str]] = {
    "missing": (lambda x: x.pop("model.layers.1.mlp.up_proj.weight"), "1 tensors missing"),
    "unexpected": (lambda x: x.update(more=torch.zeros(1)), "1 tensors unexpected"),
    "shape": (
        lambda x: x.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(5, 7)}),
        "1 tensors of another shape",
    ),
    "nan": (lambda x: x["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan), "NaN"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_sharded_targets_refuse_what_whole_ones_refuse(change, tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    BROKEN[change][0](tensors)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    refused = pytest.raises(ValueError, match=BROKEN[change][1])
    with rank_of(2, 2, 0, monkeypatch) as accelerator, refused:
        shard_target(load_target_part(str(tmp_path), layers=[], **ENDS), accelerator)


def test_an_expert_too_few_is_refused(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors[next(key for key in tensors if "layers.1." in key and ".experts.2.w1." in key)]
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensors of another shape \(model.layers.1.mlp.exp"):
        load_target_part(str(tmp_path), layers=[1], **ENDS)


# -- memory ---------------------------------------------------------------------------------


def test_a_process_holds_its_part_and_about_a_layer(parent, tmp_path):
    """Other parts use the meta device here: a GPU's memory is not the host's."""
    model = tiny_llama(layers=12, hidden=640, vocab=64)
    layer, whole = (sum(p.nbytes for p in x.parameters()) for x in (model.model.layers[0], model))
    model.to(torch.bfloat16).save_pretrained(tmp_path)  # else a loaded tensor may be the file's
    # New processes: memory freed by other tests in this one would be reused unseen.
    script, grown = "tests/support/memory_growth.py", {}
    for name in memory_growth.LOADS:
        status, out, err = Process.start(parent, tmp_path, name, ".", module=script).finish()
        assert status == 0, err
        grown[name] = int(out)
    assert grown["host"] > 0.9 * whole  # else nothing is measured
    assert grown["device"] < layer
    assert grown["sharded"] < whole / 6 + layer
    assert grown["stage"] < 3 * layer
