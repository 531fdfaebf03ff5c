"""Hidden states on disk or on demand: what is refused, and the server."""

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import feature_runs
import pytest
import torch
from feature_runs import HIDDEN, METHODS, dump, forked, status_of, write_config
from safetensors.torch import load_file, save_file
from train_runs import (
    LAYERS,
    World,
    logged,
    train,
)

from pipedraft.train import feature_link
from pipedraft.train import features as command
from pipedraft.train.feature_shards import INDEX

world = feature_runs.world
dumps = feature_runs.dumps
"""Fixtures."""

# -- refusals -------------------------------------------------------------------------------


def changed_target(world: World, folder: Path) -> Path:
    """The target of ``world`` but for one inner matrix."""
    shutil.copytree(world.target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_dump_of_another_target_or_of_other_data_is_refused(world, dumps, tmp_path, monkeypatch):
    """Also of a target that differs in one inner layer alone."""
    target = changed_target(world, tmp_path / "target")
    changes = METHODS["spd"] | {"features": dumps["bf16"]}
    lines = world.data.read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)))
    other_order = json.dumps([{"path": str(tmp_path / "reversed.jsonl")}])
    refused = {
        "is of another target .target_weights": {"target": target},
        "is of other data .train_rows": {"data__valid_fraction": 0.2},
        "is of other data .train_tokens": {"data__max_length": 30},
        "is of other data .train_ids": {"data__sources": other_order},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=f"features: .*{message}"):
            world.trainer("spd", tmp_path / "run", **changes | change)
    shutil.copytree(world.target, tmp_path / "template")
    (tmp_path / "template" / "chat_template.jinja").write_text(
        (world.target / "chat_template.jinja").read_text() + " "
    )
    with pytest.raises(ValueError, match="features: .*is of (another tokenizer|other data)"):
        world.trainer("spd", tmp_path / "run", **changes | {"target": tmp_path / "template"})


def test_a_dump_without_a_layer_of_the_head_is_refused(world, tmp_path, monkeypatch):
    arguments = world.arguments("eagle", tmp_path / "run", **METHODS["eagle"])
    monkeypatch.setattr(sys, "argv", ["features", *arguments, "--out", str(tmp_path / "dump")])
    command.main()
    with pytest.raises(ValueError, match=r"has the layers \[4\], this head also needs \[2\]"):
        world.trainer("ppsd", tmp_path / "run", **METHODS["ppsd"], features=tmp_path / "dump")


def test_options_that_contradict_a_dump_are_refused(world, dumps, tmp_path):
    folder = {"features": dumps["bf16"]}
    for method, changes, message in (
        ("spd", {"shard_target": True}, "shard_target: True with features"),
        ("spd", {"target_quantization": "8bit"}, "target_quantization: 8bit with features"),
        ("language_model", {}, "features: .* for a language model"),
    ):
        with pytest.raises(ValueError, match=message):
            world.trainer(method, tmp_path / "run", **METHODS.get(method, {}), **folder, **changes)
    with pytest.raises(ValueError, match="features: no folder .*nowhere; make it with python -m"):
        world.trainer("spd", tmp_path, **METHODS["spd"], features=tmp_path / "nowhere")


def test_what_cannot_be_dumped_is_refused_before_the_target_runs(
    world, dumps, tmp_path, monkeypatch
):
    with pytest.raises(ValueError, match="out: missing"):
        dump(world, None, monkeypatch)
    with pytest.raises(ValueError, match="shard_target: True, but every process here runs the wh"):
        dump(world, tmp_path, monkeypatch, "--shard_target", "true")
    with pytest.raises(ValueError, match="shard_mb: -1.0 is not positive"):
        dump(world, tmp_path, monkeypatch, "--shard_mb", "-1")
    with pytest.raises(ValueError, match="--dtype: invalid choice: 'int4'"):
        dump(world, tmp_path, monkeypatch, "--dtype", "int4")
    with pytest.raises(
        ValueError,
        match=r"index.json belongs to a dump of the same with other settings .dtype: bf16 !=",
    ):
        dump(world, dumps["bf16"], monkeypatch, "--dtype", "fp16")
    with pytest.raises(ValueError, match="belongs to a dump of other data .train_"):
        dump(world, dumps["bf16"], monkeypatch, data__valid_fraction=0.2)
    other = write_config(world, "eagle", tmp_path / "other.yaml", target="elsewhere")
    with pytest.raises(ValueError, match="also: a head of elsewhere, the first one's target is"):
        dump(world, tmp_path, monkeypatch, "--also", str(other))
    usage = SimpleNamespace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="out: .* has room for 100 kB, the dump takes another"):
        dump(world, tmp_path / "full", monkeypatch)


def test_a_damaged_index_is_named(world, dumps, tmp_path):
    out = tmp_path / "dump"
    shutil.copytree(dumps["bf16"], out)
    (out / INDEX).write_text((out / INDEX).read_text()[:-40])
    with pytest.raises(ValueError, match="index.json is damaged .JSONDecodeError"):
        world.trainer("spd", tmp_path / "run", **METHODS["spd"], features=out)


# -- on demand ------------------------------------------------------------------------------


@contextmanager
def served(world: World, *options: str, port: int = 0) -> Iterator[tuple[str, int]]:
    """Address and process id of a server in a process of its own."""
    arguments = world.arguments("spd", world.folder / "run", **METHODS["spd"])
    reading, writing = os.pipe()

    def work() -> None:
        sys.argv = ["features", "serve", *arguments, "--port", str(port), *options]
        sys.stdout = os.fdopen(writing, "w")
        os.close(reading)
        command.main()

    pid = forked(work)
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            yield lines.readline().rpartition(" ")[2].strip(), pid
    finally:
        os.kill(pid, signal.SIGKILL)
        status_of(pid)


@pytest.mark.parametrize("method", METHODS)
def test_training_from_a_server_is_online_training(world, tmp_path, method, monkeypatch):
    """In every epoch: a server computes the batches that the run has."""
    changes = METHODS[method] | {"max_steps": 8, "evaluation__every_steps": 4}
    train(world.arguments(method, tmp_path / "online", **changes), monkeypatch)
    with served(world, "--dtype", "fp32") as (address, _):
        arguments = world.arguments(method, tmp_path / "served", **changes, features=address)
        train(arguments, monkeypatch)
    assert logged(tmp_path / "served") == logged(tmp_path / "online")


def test_a_server_that_is_killed_and_comes_back_is_asked_again(world, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_link, "CONNECT_S", 30.0)
    with served(world, "--dtype", "int8") as (address, _):
        trainer = world.trainer("eagle", tmp_path, **METHODS["eagle"], features=address)
        batch = trainer.load(trainer.data.train, [3, 5])
        before = trainer.objective.hidden(batch)
    port = int(address.rpartition(":")[2])
    with served(world, "--dtype", "int8", port=port):
        after = trainer.objective.hidden(batch)
    assert torch.equal(before[LAYERS], after[LAYERS])
    monkeypatch.setattr(feature_link, "CONNECT_S", 0.5)
    with pytest.raises(ValueError, match="features: nobody serves states at 127.0.0.1:.*; start"):
        trainer.objective.hidden(batch)


def test_a_server_refuses_what_its_target_cannot_answer_and_goes_on(world, tmp_path):
    with served(world) as (address, _):
        trainer = world.trainer("eagle", tmp_path, **METHODS["eagle"], features=address)
        source = trainer.objective.features.source
        for ids, layers, message in (
            ([[1, 2], [3, 100_000]], [4], "ids: not all in .0, "),
            ([[1, 2]], [5], "layers: .5. are not all in 1..4"),
            ([[1] * 600], [4], "batch: 1 rows of up to 600 tokens; this server takes 512"),
            ([[1] * 500] * 50, [4], "batch: 50 rows of up to 500 tokens"),
            ([], [4], "lengths: 0 tokens in rows"),
        ):
            source.layers = layers
            with pytest.raises(ValueError, match=f"features: {address} refuses: {message}"):
                source.fetch(range(len(ids)), ids)
        source.layers = [4]
        assert source.fetch([0], [[1, 2, 3]])["layer.4"].shape == (3, HIDDEN)


def test_what_is_no_frame_ends_the_link_and_not_the_server(world, tmp_path):
    with served(world) as (address, _):
        host, port = address.split(":")
        for junk in (
            b"GET / HTTP/1.1" + bytes(20),
            feature_link.HEADER.pack(feature_link.MAGIC, feature_link.ASK, 1 << 60),
            feature_link.HEADER.pack(feature_link.MAGIC, feature_link.ASK, 8)[:-1],
        ):
            with socket.create_connection((host, int(port)), timeout=20) as link:
                kind, _ = feature_link.receive_frame(link, 10_000, begin_s=20)
                assert kind == feature_link.HELLO
                link.settimeout(20)
                with suppress(ConnectionError, OSError):  # reset: it did not read all of it
                    link.sendall(junk)
                    link.shutdown(socket.SHUT_WR)
                    assert link.recv(1) == b""
        trainer = world.trainer("eagle", tmp_path, **METHODS["eagle"], features=address)
        assert trainer.objective.features.source.fetch([0], [[1, 2]])["layer.4"].shape == (2, 32)


def test_an_answer_that_claims_too_much_is_not_allocated():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(feature_link.HEADER.pack(feature_link.MAGIC, feature_link.STATES, 1 << 40))
        with pytest.raises(ConnectionError, match="claims 1099511627776 bytes"):
            feature_link.receive_frame(ours, 10_000, begin_s=5)
        theirs.close()
        with pytest.raises(ConnectionError, match="closed the link"):
            feature_link.receive_frame(ours, 10_000, begin_s=5)


def test_a_server_of_another_target_is_refused(world, tmp_path):
    target = changed_target(world, tmp_path / "target")
    with (
        served(world) as (address, _),
        pytest.raises(ValueError, match="features: 127.0.0.1:.* serves another target .target_w"),
    ):
        world.trainer("spd", tmp_path / "run", **METHODS["spd"], target=target, features=address)
