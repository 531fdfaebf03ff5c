"""Test hidden states computed once: training from them is the same; kills, damage, refusals."""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import feature_runs
import pytest
import torch
from accelerate.state import AcceleratorState
from feature_runs import HIDDEN, METHODS, dump
from fork_server import forked, rank_environments, status_of
from safetensors.torch import load_file
from torch.distributed import TCPStore
from train_processes import before_calls, shorten_usual_timeout
from train_runs import (
    World,
    assert_equal_weights,
    logged,
    train,
    weights,
)

from pipedraft.models.target import capture_hidden
from pipedraft.train.features import dump as dump_module
from pipedraft.train.features.shards import INDEX, decode, encode

world, dumps = feature_runs.world, feature_runs.dumps


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


# -- the same training ----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_training_from_a_dump_in_fp32_is_online_training_bit_for_bit(
    world, dumps, tmp_path, method, monkeypatch
):
    """Held-out rows are batched unlike a dump's, so some processors round them differently."""
    changes = METHODS[method] | {"evaluation__every_steps": 2}
    for name, features in (("online", None), ("offline", dumps["fp32"])):
        arguments = world.arguments(method, tmp_path / name, **changes, features=features)
        train(arguments, monkeypatch)
    offline, online = (logged(tmp_path / name) for name in ("offline", "online"))
    assert any("loss" in record for record in online)
    for ours, theirs in zip(offline, online, strict=True):
        is_step = "loss" in theirs
        assert ours == (theirs if is_step else pytest.approx(theirs, rel=1e-6))
    best = [weights(tmp_path / name / "best") for name in ("offline", "online")]
    assert_equal_weights(*best)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in logged(folder) if "loss" in record]


def test_over_several_epochs_the_losses_are_those_of_online_training(
    world, dumps, tmp_path, monkeypatch
):
    """Later epochs batch the rows differently, so they round differently."""
    runs = {"online": None, **dumps}
    for name, features in runs.items():
        changes = METHODS["spd"] | {"max_steps": 16, "evaluation__every_steps": 0}
        train(world.arguments("spd", tmp_path / name, features=features, **changes), monkeypatch)
    online = losses(tmp_path / "online")
    assert online[-1] < 0.9 * online[0]
    for dtype, tolerance in {"fp32": 2e-6, "bf16": 5e-4, "int8": 2e-3}.items():
        offline = losses(tmp_path / dtype)
        worst = max(abs(a / b - 1) for a, b in zip(offline, online, strict=True))
        assert worst < tolerance and (worst > 0 or dtype == "fp32")


@pytest.mark.parametrize("method", METHODS)
def test_no_layer_of_the_target_is_loaded(world, dumps, tmp_path, method):
    trainer = world.trainer(method, tmp_path, **METHODS[method], features=dumps["bf16"])
    decoder = trainer.objective.target.get_decoder()
    loaded = [not p.is_meta for layer in decoder.layers for p in layer.parameters()]
    if method == "ppsd":  # its layers start as copies of the layers after the first stage
        assert [not layer.mlp.up_proj.weight.is_meta for layer in decoder.layers] == [0, 0, 1, 0]
    elif method == "flexspec":  # the anchor copies the last layer
        assert [not layer.mlp.up_proj.weight.is_meta for layer in decoder.layers] == [0, 0, 0, 1]
    else:
        assert not any(loaded)
    assert not decoder.norm.weight.is_meta and not decoder.embed_tokens.weight.is_meta


def test_batches_are_fetched_ahead_and_once(world, dumps, tmp_path):
    trainer = world.trainer(
        "spd", tmp_path, **METHODS["spd"], features=dumps["bf16"], accumulation=2, max_steps=6
    )
    features, asked = trainer.objective.features, []
    fetch = features.source.fetch
    features.source.fetch = lambda rows, ids: asked.append(sorted(rows)) or fetch(rows, ids)
    windows = trainer.windows()
    for _ in range(2):
        trainer.optimize(next(windows))
    features._executor.shutdown(wait=True)
    assert sorted(asked) == sorted(sorted(rows) for rows in trainer.epoch_batches(0)[:5])


def test_a_packed_row_has_the_states_of_its_documents(world, dumps, tmp_path):
    trainer = world.trainer("spd", tmp_path, **METHODS["spd"], features=dumps["fp32"])
    features, dtype = trainer.objective.features, torch.float32
    batch = trainer.load(trainer.data.train, [7, 3, 11])
    padded = features.read(batch, [2, 4], dtype)
    is_text_BT = batch.places() >= 0
    packed = replace(batch, ids_BT=batch.ids_BT[is_text_BT][None])
    packed = features.read(packed, [2, 4], dtype)
    for layer, states_BTH in packed.items():
        assert torch.equal(states_BTH[0], padded[layer][is_text_BT])
        assert not padded[layer][~is_text_BT].any()


# -- what is stored -------------------------------------------------------------------------


def test_stored_states_are_the_targets(world, dumps, tmp_path):
    """Compare every row with the target run on it alone."""
    trainer = world.trainer("spd", tmp_path, **METHODS["spd"])
    target, data = trainer.objective.target, trainer.data
    ids = [*data.train["input_ids"], *data.valid["input_ids"]]
    bounds = {"fp32": 1e-6, "bf16": 3e-3, "int8": 9e-3}
    for dtype, bound in bounds.items():
        index = index_of(dumps[dtype])
        assert index["settings"]["layers"] == [1, 2, 3, 4]
        exact, kept = torch.empty(0, HIDDEN), torch.empty(0, HIDDEN)
        for path in sorted(dumps[dtype].glob("*.safetensors")):
            tensors = load_file(path)
            stored = decode(tensors["layer.4"], tensors.get("layer.4.scale"), torch.float32)
            rows = [torch.tensor([ids[row]]) for row in tensors["rows"].tolist()]
            alone = [capture_hidden(target, row, [4])[4][0] for row in rows]
            exact, kept = torch.cat([exact, *alone]), torch.cat([kept, stored])
        assert len(exact) == sum(index["shard_tokens"]) == sum(map(len, ids))
        assert (kept - exact).norm() <= bound * exact.norm()


def test_int8_keeps_every_position_within_half_a_step_of_its_own_scale():
    hidden_MH = torch.randn(50, HIDDEN) * torch.logspace(-3, 3, 50)[:, None]
    hidden_MH[7] = 0
    stored = encode(hidden_MH, "int8", 3)
    assert stored["layer.3"].dtype == torch.int8
    kept_MH = decode(stored["layer.3"], stored["layer.3.scale"], torch.float32)
    half_step_M1 = hidden_MH.abs().amax(-1, keepdim=True) / 254
    assert ((kept_MH - hidden_MH).abs() <= half_step_M1 * 1.0001).all()
    assert not kept_MH[7].any()


def test_the_estimate_is_what_the_dump_takes(world, dumps, monkeypatch, capsys):
    dump(world, None, monkeypatch, "--estimate")
    table = capsys.readouterr().out
    assert "| spd (run) | 1, 2, 3, 4 | 512 | 256 | 144 | 524 kB |" in table
    assert "| eagle (run) | 4 | 128 | 64 | 36 | 131 kB |" in table
    assert "| ppsd (run) | 2, 4 |" in table and "| together | 1, 2, 3, 4 |" in table
    for dtype, per_token in (("fp32", 512), ("bf16", 256), ("int8", 144)):
        index = index_of(dumps[dtype])
        assert index["bytes_per_token"] == per_token
        tokens = index["shard_tokens"]
        stored = sum(path.stat().st_size for path in dumps[dtype].glob("*.safetensors"))
        assert 0 < stored - per_token * sum(tokens) < 3000 * len(tokens)


# -- kills and damage -----------------------------------------------------------------------


def dump_killed_at(world: World, out: Path, moment: int) -> bool:
    """Dump in a process killed at a file operation in ``out``; False if it ends first."""

    def work() -> None:
        count = 0

        def audit(event: str, arguments: tuple) -> None:
            nonlocal count
            is_counted = event in ("open", "os.rename", "os.remove")
            if is_counted and str(arguments[0]).startswith(str(out)):
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        with pytest.MonkeyPatch.context() as monkeypatch:
            dump(world, out, monkeypatch, "--dtype", "bf16")

    status = status_of(forked(work))
    assert status in (0, -signal.SIGKILL)
    return status != 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_dump_killed_at_any_moment_goes_on_to_the_same_folder(
    world, dumps, tmp_path, monkeypatch, capsys
):
    whole, went_on, num_shards = (
        contents(dumps["bf16"]),
        0,
        len(index_of(dumps["bf16"])["shard_tokens"]),
    )
    assert num_shards >= 3
    for moment in (3, 6, 8):
        out = tmp_path / str(moment)
        assert dump_killed_at(world, out, moment)
        with pytest.raises(ValueError, match="has no index.json; make|safetensors is missing; run"):
            world.trainer("spd", tmp_path / "run", **METHODS["spd"], features=out)
        capsys.readouterr()
        dump(world, out, monkeypatch, "--dtype", "bf16")
        went_on += "already there" in capsys.readouterr().out
        assert contents(out) == whole
    assert went_on >= 2


def test_processes_share_the_shards_of_a_dump(world, dumps, tmp_path):
    """One process searches for shards longer than a collective call may usually take."""
    out = tmp_path / "dump"
    assert dump_killed_at(world, out, 7)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = rank_environments(2, store.port)

    def work(rank: int) -> None:
        shorten_usual_timeout(1)
        if rank == 0:
            before_calls(dump_module, "open_shard", partial(time.sleep, 2.5))
        os.environ.update(ranks[rank], ACCELERATE_USE_CPU="true")
        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            dump(world, out, monkeypatch, "--dtype", "bf16")

    pids = [forked(partial(work, rank)) for rank in range(2)]
    assert [status_of(pid) for pid in pids] == [0, 0]
    assert contents(out) == contents(dumps["bf16"])


def test_a_damaged_shard_is_named_and_made_again(world, dumps, tmp_path, monkeypatch, capsys):
    out = tmp_path / "dump"
    shutil.copytree(dumps["bf16"], out)
    arguments = world.arguments("spd", tmp_path / "run", **METHODS["spd"], features=out)
    (out / "shard-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="shard-00002.safetensors is missing; run pipedraft"):
        train(arguments, monkeypatch)
    with (out / "shard-00000.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="shard-00000.safetensors is damaged .*; run pipedraft"):
        train(arguments, monkeypatch)
    capsys.readouterr()
    dump(world, out, monkeypatch, "--dtype", "bf16")
    said = capsys.readouterr().out
    assert re.findall(r"(shard-\d+).safetensors is damaged", said) == ["shard-00000"]
    assert contents(out) == contents(dumps["bf16"])


def test_a_finished_dump_is_left_alone(world, dumps, monkeypatch, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in dumps["int8"].iterdir()}
    dump(world, dumps["int8"], monkeypatch, "--dtype", "int8")
    assert before == {path.name: path.stat().st_mtime_ns for path in dumps["int8"].iterdir()}
