"""Hidden states on disk or on demand: refusals, and the server."""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import feature_runs
import pytest
import torch
from feature_runs import HIDDEN, METHODS, dump, write_config
from fork_server import forked, status_of
from pretended_device import pretended_cuda
from safetensors.torch import load_file, save_file
from train_runs import (
    LAYERS,
    World,
    as_rank,
    assert_equal_weights,
    logged,
    train,
    weights,
)

from pipedraft.inference.ranks.codec import MAGIC, PREFIX
from pipedraft.models.target import load_tokenizer
from pipedraft.train.checkpoint import step_folders
from pipedraft.train.features import __main__ as command
from pipedraft.train.features import link as feature_link
from pipedraft.train.features.reader import Features, open_features
from pipedraft.train.features.shards import INDEX
from pipedraft.train.loop import OF_THE_HOST

world = feature_runs.world
dumps = feature_runs.dumps
"""Fixtures."""

# -- refusals -------------------------------------------------------------------------------


def changed_target(world: World, folder: Path) -> Path:
    """Target from ``world`` with one inner matrix changed."""
    shutil.copytree(world.target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_dump_of_another_target_or_of_other_data_is_refused(world, dumps, tmp_path, monkeypatch):
    """A target with one differing inner layer is refused too."""
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
    for name, value in (("port", "7500"), ("host", "0.0.0.0")):
        with pytest.raises(ValueError, match=f"^{name}: {value} without serve; give serve as"):
            dump(world, tmp_path, monkeypatch, f"--{name}", value)
    with pytest.raises(ValueError, match="shard_target: True, but every process here runs the wh"):
        dump(world, tmp_path, monkeypatch, "--shard_target", "true")
    with pytest.raises(ValueError, match="shard_mb: -1.0 is not positive"):
        dump(world, tmp_path, monkeypatch, "--shard_mb", "-1")
    with pytest.raises(ValueError, match="--dtype: .*Got value: int4"):
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
    with pytest.raises(ValueError, match="index.json is damaged .DecodeError"):
        world.trainer("spd", tmp_path / "run", **METHODS["spd"], features=out)


# -- on demand ------------------------------------------------------------------------------


@contextmanager
def served(world: World, *options: str, port: int = 0) -> Iterator[tuple[str, int]]:
    """Address and process id of a server in its own process."""
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


SERVED = ("spd", "eagle3", "dspark")
"""test_features.py compares stored states for every method."""


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.all] * (name not in SERVED)) for name in METHODS],
)
def test_training_from_a_server_is_online_training(world, tmp_path, method, monkeypatch):
    """In every epoch a server computes the run's batches.

    SPD sorts a batch's rows by their fill after they are asked for: rounded otherwise on some
    processors.
    """
    changes = METHODS[method] | {"max_steps": 8, "evaluation__every_steps": 4}
    train(world.arguments(method, tmp_path / "online", **changes), monkeypatch)
    with served(world, "--dtype", "fp32") as (address, _):
        arguments = world.arguments(method, tmp_path / "served", **changes, features=address)
        train(arguments, monkeypatch)
    online, found = logged(tmp_path / "online"), logged(tmp_path / "served")
    for ours, theirs in zip(found, online, strict=True):
        assert ours == (pytest.approx(theirs, rel=2e-6) if method == "spd" else theirs)


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
    with pytest.raises(ValueError, match="nobody serves hidden states at 127.0.0.1:.*; start"):
        trainer.objective.hidden(batch)


def test_processes_share_servers_and_take_over_from_one_that_ends(world, tmp_path, monkeypatch):
    """Rank 1 asks the second server. After that server ends, the rank asks the first one."""
    with served(world, "--dtype", "fp32") as (first, _):
        with served(world, "--dtype", "fp32") as (second, _):
            changes = METHODS["eagle"] | {"features": f"{first},{second}"}
            trainer = world.trainer("eagle", tmp_path, **changes)
            run, objective = trainer.config, trainer.objective
            batch = trainer.load(trainer.data.train, [3, 5])
            expected = objective.hidden(batch)[LAYERS]
            assert objective.features.source.address == first
            rank = as_rank(trainer, 1, 2)
            tokenizer = load_tokenizer(str(world.target))
            objective.features = open_features(run, objective, tokenizer, trainer.data, rank)
            assert objective.features.source.address == second
            assert torch.equal(objective.hidden(batch)[LAYERS], expected)
        assert torch.equal(objective.hidden(batch)[LAYERS], expected)
        assert objective.features.source.address == first
    monkeypatch.setattr(feature_link, "CONNECT_S", 0.5)
    with pytest.raises(ValueError, match="nobody serves hidden states at 127.0.0.1:.*; start"):
        objective.hidden(batch)
    with pytest.raises(ValueError, match="features: 'out/dump' among addresses; give HOST:PORT,"):
        world.trainer("eagle", tmp_path, **changes | {"features": f"{first},out/dump"})


def test_states_go_to_a_gpu_from_pinned_memory(world, dumps, tmp_path, monkeypatch):
    """A thread fetches the next batch while the present one is computed."""
    changes = METHODS["spd"] | {"features": dumps["int8"]}
    trainer = world.trainer("spd", tmp_path, **changes)
    source, by_main = trainer.objective.features.source, []
    rows = [[3, 5], [4, 7]]
    batches = [trainer.load(trainer.data.train, chosen) for chosen in rows]
    expected = [Features(source, pins=False).read(x, [2, 4], torch.float32) for x in batches]

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        by_main.append(threading.current_thread() is threading.main_thread())
        return tensor

    with pretended_cuda():
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        features = Features(source, pins=True)
        features.expect([(rows[1], trainer.data.train[rows[1]]["input_ids"])])
        for batch, states in zip(batches, expected, strict=True):
            moved = {key: x if key in OF_THE_HOST else x.to("cuda:0") for key, x in batch.items()}
            found = features.read(moved, [2, 4], torch.float32)
            for layer, states_BTH in states.items():
                assert torch.equal(found[layer].cpu(), states_BTH)
    num_tensors = 2 * len(source.layers)  # int8 has scales
    assert by_main == [True] * num_tensors + [False] * num_tensors


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
    ids_M, lengths_R = torch.arange(3, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    question = feature_link.StatesQuestion(ids_M, lengths_R, [4])
    with served(world) as (address, _):
        host, port = address.split(":")
        for junk in (
            b"GET / HTTP/1.1" + bytes(20),
            PREFIX.pack(MAGIC, 1 << 10, 1 << 60),
            PREFIX.pack(MAGIC, 1 << 10, 1 << 20),
            bytes(feature_link.QUESTIONS.encode(question).join())[:-1],
        ):
            with socket.create_connection((host, int(port)), timeout=100) as link:
                hello = feature_link.ANSWERS.read(feature_link.filling(link, 100))
                assert isinstance(hello, feature_link.ServedTarget) and hello.dtype == "bf16"
                link.settimeout(100)
                with suppress(ConnectionError, OSError):  # reset: it did not read everything
                    link.sendall(junk)
                    link.shutdown(socket.SHUT_WR)
                    assert link.recv(1) == b""
        trainer = world.trainer("eagle", tmp_path, **METHODS["eagle"], features=address)
        assert trainer.objective.features.source.fetch([0], [[1, 2]])["layer.4"].shape == (2, 32)


def test_links_that_claim_much_and_send_little_take_no_memory(world):
    """Sixteen bytes each, with the largest claim allowed for a question."""
    with served(world) as (address, pid), ExitStack() as stack:
        host, port = address.split(":")
        before = resident_bytes(pid)
        for _ in range(100):
            link = stack.enter_context(socket.create_connection((host, int(port)), timeout=100))
            feature_link.ANSWERS.read(feature_link.filling(link, 100))
            link.sendall(PREFIX.pack(MAGIC, 1 << 10, feature_link.MAX_QUESTION_BYTES))
        assert resident_bytes(pid) - before < 100 << 20


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_answer_that_claims_too_much_is_not_allocated():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(PREFIX.pack(MAGIC, 8, 1 << 40))
        with pytest.raises(ValueError, match="claims 8 bytes of header and 1099511627776 of tenso"):
            feature_link.ANSWERS.read(feature_link.filling(ours, 5), max_tensor_bytes=10_000)
        theirs.close()
        with pytest.raises(ConnectionError, match="closed the link"):
            feature_link.ANSWERS.read(feature_link.filling(ours, 5), max_tensor_bytes=10_000)


def test_states_of_another_shape_than_asked_for_are_refused(world, tmp_path, monkeypatch):
    with served(world, "--dtype", "int8") as (address, _):
        trainer = world.trainer("eagle", tmp_path, **METHODS["eagle"], features=address)
        source = trainer.objective.features.source
        with monkeypatch.context() as patch:
            patch.setattr(source, "_dtype", "fp32")
            with pytest.raises(feature_link.FeaturesLost, match="'layer.4.scale'.; want .'layer.4"):
                source.fetch([0], [[1, 2, 3]])
        assert source.fetch([0], [[1, 2, 3]])["layer.4.scale"].shape == (3,)


def test_a_port_that_cannot_be_is_refused_at_once(world, tmp_path):
    for port in (0, 99_999):
        with pytest.raises(ValueError, match=f"features: '127.0.0.1:{port}': port {port} is not"):
            world.trainer("eagle", tmp_path, **METHODS["eagle"], features=f"127.0.0.1:{port}")


GREETING = feature_link.ServedTarget({"hidden_size": HIDDEN}, "fp32")
LIES = {  # a server's bytes, their repeats, and the error message
    "nothing": (b"", 0, "nobody serves hidden states at .*nothing came for 0.3 s"),
    "half a frame": (PREFIX.pack(MAGIC, 8, 0), 1, "nobody serves .*it came too slowly"),
    "noise": (bytes(range(256)), 1, "no server at .*starts with"),
    "a greeting": (feature_link.ANSWERS.encode(GREETING).join(), 1, "last of 2 .*nothing came"),
    "greetings": (feature_link.ANSWERS.encode(GREETING).join(), 99, "refuses: it only greets"),
    "drops": (feature_link.ANSWERS.encode(GREETING).join(), -1, "last of 2 .*came too slowly"),
}


@pytest.mark.parametrize(("sent", "times", "text"), LIES.values(), ids=LIES)
def test_a_server_that_lies_or_is_silent_is_lost_in_time(sent, times, text, monkeypatch):
    # On a busy machine the server's message may come late: allow time, or another try.
    for name, seconds in {
        "CONNECT_S": 0.3 if text.startswith("nobody") else 60.0,
        "FRAME_S": 2.0 if sent.startswith(PREFIX.pack(MAGIC, 8, 0)) else 0.3,
        "ANSWER_S": 60.0 if times == 99 else 0.3,
    }.items():
        monkeypatch.setattr(feature_link, name, seconds)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def lie(link: socket.socket) -> None:
            with suppress(OSError):
                link.sendall(bytes(sent) * abs(times))
                link.sendall(PREFIX.pack(MAGIC, 1 << 10, 0) * (times < 0))
                while times < 0:  # in a frame that never ends
                    time.sleep(0.05)
                    link.sendall(b" ")

        def accept() -> None:
            with suppress(OSError):
                while True:
                    link = stack.enter_context(server.accept()[0])
                    threading.Thread(target=lie, args=(link,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(feature_link.FeaturesLost, match=f"^features: .*{text}"):
            identity = {"hidden_size": HIDDEN}
            feature_link.RemoteStates([server.getsockname()], identity, [1]).fetch([0], [[1, 2]])
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("when", ["step", "evaluation"])
def test_a_run_that_loses_its_server_saves_and_goes_on_later(world, tmp_path, when, monkeypatch):
    """The resumed run ends with the same weights as an undisturbed one."""
    patience_s = feature_link.CONNECT_S
    changes = METHODS["eagle"] | {"max_steps": 6, "evaluation__every_steps": 3, "accumulation": 2}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fetch = feature_link.RemoteStates.fetch
    asked = []
    with served(world) as (address, pid):
        arguments = world.arguments("eagle", whole, **changes, features=address)
        train(arguments, monkeypatch)
        num_train = len(world.trainer("eagle", cut, **changes, features=address).data.train)

        def lose(source, rows, ids):
            asked.append(rows)
            if len(asked) > 4 and (when == "step" or max(rows) >= num_train):
                os.kill(pid, signal.SIGKILL)
                monkeypatch.setattr(feature_link, "CONNECT_S", 0.2)
            return fetch(source, rows, ids)

        monkeypatch.setattr(feature_link.RemoteStates, "fetch", lose)
        with pytest.raises(SystemExit) as ended:
            train(world.arguments("eagle", cut, **changes, features=address), monkeypatch)
        assert ended.value.code == 1 and step_folders(cut)
    monkeypatch.setattr(feature_link.RemoteStates, "fetch", fetch)
    monkeypatch.setattr(feature_link, "CONNECT_S", patience_s)
    with served(world) as (address, _):
        train(world.arguments("eagle", cut, **changes, features=address), monkeypatch)
    assert logged(cut) == logged(whole)
    assert_equal_weights(weights(cut / "best"), weights(whole / "best"))


def test_a_server_of_another_target_is_refused(world, tmp_path):
    target = changed_target(world, tmp_path / "target")
    with (
        served(world) as (address, _),
        pytest.raises(ValueError, match="features: 127.0.0.1:.* serves another target .target_w"),
    ):
        world.trainer("spd", tmp_path / "run", **METHODS["spd"], target=target, features=address)
