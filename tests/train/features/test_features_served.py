"""Test hidden states on disk or from servers: refusals, and the client for vLLM's server."""

import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import feature_runs
import pytest
import torch
from feature_runs import HIDDEN, METHODS, dump, write_config
from pretended_device import pretended_cuda
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_runs import LAYERS, World, as_rank, assert_equal_weights, logged, train, weights

from pipedraft.models.target import capture_hidden, load_target, load_tokenizer
from pipedraft.train.checkpoint import step_folders
from pipedraft.train.features import __main__ as command
from pipedraft.train.features import online
from pipedraft.train.features.online import FeaturesLost, ServedStates
from pipedraft.train.features.partial_target import TIE, check_served, open_features
from pipedraft.train.features.reader import Features
from pipedraft.train.features.shards import INDEX

world = feature_runs.world
dumps = feature_runs.dumps
"""Fixtures."""

# -- refusals -------------------------------------------------------------------------------


def changed_target(world: World, folder: Path) -> Path:
    """Save ``world``'s target with one inner matrix changed."""
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
    with pytest.raises(ValueError, match="features: no folder .*nowhere; make it with pipedraft"):
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
    arguments = world.arguments("spd", tmp_path / "run", **METHODS["spd"])
    other = write_config(world, "eagle", tmp_path / "also.yaml")
    for more, message in (
        ([], "port: missing; give for example"),
        (["--port", "1", "--also", str(other)], "also: .*also.yaml with serve; start a server for"),
    ):
        monkeypatch.setattr(sys, "argv", ["features", "serve", *arguments, *more])
        with pytest.raises(ValueError, match=message):
            command.main()
    with pytest.raises(ValueError, match="shard_mb: -1.0 is not positive"):
        dump(world, tmp_path, monkeypatch, "--shard_mb", "-1")
    with pytest.raises(ValueError, match="--dtype: .int4. is unknown"):
        dump(world, tmp_path, monkeypatch, "--dtype", "int4")
    with pytest.raises(
        ValueError,
        match=r"index.json belongs to a dump of the same with other settings .dtype: bf16 !=",
    ):
        dump(world, dumps["bf16"], monkeypatch, "--dtype", "int8")
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
    whole = (out / INDEX).read_text()
    for damaged in (whole[:-40], json.dumps(json.loads(whole) | {"settings": {"layers": 3}})):
        (out / INDEX).write_text(damaged)
        with pytest.raises(ValueError, match="index.json is damaged"):
            world.trainer("spd", tmp_path / "run", **METHODS["spd"], features=out)


# -- from a server ----------------------------------------------------------------------------

Answer = Callable[[list[int], Path], tuple[int, object]]
"""Status and JSON for a token row, with a path for its file."""


class Server:
    """Server with vLLM's protocol on 127.0.0.1."""

    def __init__(self, answer: Answer, folder: Path, port: int = 0) -> None:
        self.asked: list[list[int]] = []
        turn = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                handler.reply(200, {"data": [{"id": "target"}]})

            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                question = json.loads(body)
                with turn:
                    self.asked.append(question["prompt"])
                    path = folder / f"{port}-{len(self.asked)}.safetensors"
                    status, payload = answer(question["prompt"], path)
                handler.reply(status, payload)

            def reply(handler, status: int, payload: object) -> None:
                text = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            def log_message(handler, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def end(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def written(path: Path, ids: list[int], states: Tensor, token: int = 0) -> tuple[int, object]:
    """Write a row's file like vLLM's connector, with the answer's token in it."""
    states = torch.cat([states, torch.zeros_like(states[:1])])
    save_file({"hidden_states": states, "token_ids": torch.tensor([*ids, token])}, path)
    Path(f"{path}.lock").touch()
    files = {"hidden_states_path": str(path)}
    return 200, {"kv_transfer_params": files, "choices": [{"token_ids": [token]}]}


@pytest.fixture(scope="module")
def serve(world, tmp_path_factory):
    """Start servers for hidden states: ``world``'s target at the given layers."""
    target = load_target(str(world.target))

    @contextmanager
    def started(layers: list[int], port: int = 0) -> Iterator[Server]:
        def answer(ids: list[int], path: Path) -> tuple[int, object]:
            with torch.no_grad():
                hidden = capture_hidden(target, torch.tensor([ids]), [*layers, LAYERS])
                last_H = target.get_decoder().norm(hidden[LAYERS][0, -1])
                token = int(target.lm_head(last_H).argmax())
            return written(path, ids, torch.stack([hidden[i][0] for i in layers], 1), token)

        server = Server(answer, tmp_path_factory.mktemp("states"), port)
        try:
            yield server
        finally:
            server.end()

    return started


@pytest.mark.parametrize("method", ["spd", "eagle3", "dspark"])
def test_training_from_a_server_is_online_training(world, tmp_path, method, monkeypatch, serve):
    """A row alone is rounded otherwise than in a batch."""
    changes = METHODS[method] | {"max_steps": 6, "evaluation__every_steps": 3}
    trainer = world.trainer(method, tmp_path / "other", **changes)
    layers = sorted({*trainer.objective.draft.taps, LAYERS} - {0})
    train(world.arguments(method, tmp_path / "online", **changes), monkeypatch)
    with serve(layers) as server:
        arguments = world.arguments(method, tmp_path / "run", **changes, features=server.address)
        train(arguments, monkeypatch)
    online_log, found = logged(tmp_path / "online"), logged(tmp_path / "run")
    assert len(found) == len(online_log)
    for ours, theirs in zip(found, online_log, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


ROWS = [[5, 6, 7], [8, 9]]


def per_layer(world, source: ServedStates) -> dict[str, bool]:
    """Compare each layer's states with the target's own forward, row by row."""
    target, found = load_target(str(world.target)), source.fetch([0, 1], ROWS)
    with torch.no_grad():
        own = [capture_hidden(target, torch.tensor([ids]), source.layers) for ids in ROWS]
    return {
        f"layer.{i}": torch.equal(found[f"layer.{i}"], torch.cat([row[i][0] for row in own]))
        for i in source.layers
    }


def test_each_layer_has_its_own_states_and_a_swap_is_noticed(world, serve):
    with serve([1, 2, LAYERS]) as server:
        source = ServedStates([server.address], [LAYERS, 2, 1], HIDDEN)
        assert all(per_layer(world, source).values())
    with serve([2, 1, LAYERS]) as server:
        source = ServedStates([server.address], [1, 2, LAYERS], HIDDEN)
        assert [*per_layer(world, source).values()] == [False, False, True]


def test_a_server_that_ends_and_comes_back_is_asked_again(world, tmp_path, monkeypatch, serve):
    with serve([LAYERS]) as server:
        port = server.http.server_port
        changes = METHODS["eagle"] | {"features": server.address}
        trainer = world.trainer("eagle", tmp_path, **changes)
        batch = trainer.load(trainer.data.train, [3, 5])
        before = trainer.objective.hidden(batch)
    with serve([LAYERS], port):
        assert torch.equal(before[LAYERS], trainer.objective.hidden(batch)[LAYERS])
    monkeypatch.setattr(online, "PATIENCE_S", 0.3)
    with pytest.raises(FeaturesLost, match="features: http.* sends no hidden states .*; start"):
        trainer.objective.hidden(batch)


def test_processes_share_servers_and_take_over_from_one_that_ends(world, tmp_path, serve):
    """Rank 1 asks the second server. After that server ends, the rank asks the first one."""
    with serve([LAYERS]) as first:
        with serve([LAYERS]) as second:
            changes = METHODS["eagle"] | {"features": f"{first.address},{second.address}"}
            trainer = world.trainer("eagle", tmp_path, **changes)
            run, objective = trainer.config, trainer.objective
            batch = trainer.load(trainer.data.train, [3, 5])
            expected = objective.hidden(batch)[LAYERS]
            assert not second.asked
            rank, tokenizer = as_rank(trainer, 1, 2), load_tokenizer(str(world.target))
            objective.features = open_features(run, objective, tokenizer, trainer.data, rank)
            num_asked = len(first.asked)
            assert torch.equal(objective.hidden(batch)[LAYERS], expected)
            assert len(second.asked) == 3 and len(first.asked) == num_asked
        assert torch.equal(objective.hidden(batch)[LAYERS], expected)
        assert len(first.asked) == num_asked + 2


@pytest.mark.parametrize("when", ["step", "evaluation"])
def test_a_run_that_loses_its_server_saves_and_goes_on_later(
    world, tmp_path, when, monkeypatch, serve
):
    """The resumed run ends with the same weights as an undisturbed one."""
    changes = METHODS["eagle"] | {"max_steps": 6, "evaluation__every_steps": 3, "accumulation": 2}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fetch, asked = ServedStates.fetch, []
    with serve([LAYERS]) as server:
        changes |= {"features": server.address}
        train(world.arguments("eagle", whole, **changes), monkeypatch)
        num_train = len(world.trainer("eagle", cut, **changes).data.train)

        def lose(source, rows, ids):
            asked.append(rows)
            if len(asked) > 4 and (when == "step" or max(rows) >= num_train):
                raise FeaturesLost("features: gone")
            return fetch(source, rows, ids)

        with monkeypatch.context() as patch:
            patch.setattr(ServedStates, "fetch", lose)
            with pytest.raises(SystemExit) as ended:
                train(world.arguments("eagle", cut, **changes), monkeypatch)
        assert ended.value.code == 1 and step_folders(cut)
        train(world.arguments("eagle", cut, **changes), monkeypatch)
    assert logged(cut) == logged(whole)
    assert_equal_weights(weights(cut / "best"), weights(whole / "best"))


def test_a_server_of_another_target_or_other_layers_is_refused(world, tmp_path, serve):
    for layers in ([2], [2, LAYERS]):
        with serve(layers) as server:
            changes = METHODS["eagle"] | {"features": server.address}
            is_alone = len(layers) == 1
            message = "states of http.* are not this target" if is_alone else "want 1 layer|larger"
            with pytest.raises(ValueError, match=f"features: .*{message}"):
                world.trainer("eagle", tmp_path, **changes)


def test_a_tie_is_judged_by_the_familys_own_logits(world):
    """Granite divides its LM head's output: a gap there is smaller in the logits."""
    target, ids = load_target(str(world.target)), [5, 6, 7]
    with torch.no_grad():
        (last_LH,) = capture_hidden(target, torch.tensor([ids]), [LAYERS])[LAYERS]
        best, second = target.lm_head(target.get_decoder().norm(last_LH[-1])).topk(2)
    gap = float(best[0] - best[1])
    source = SimpleNamespace(
        addresses=["http://a"], ask=lambda _: [(last_LH[:, None], int(second[1]))]
    )
    for scale, is_refused in ((0.9 * gap / TIE, True), (1.1 * gap / TIE, False)):
        target.config.logits_scaling = scale
        with pytest.raises(ValueError, match="not this target's") if is_refused else nullcontext():
            check_served(source, target, ids)


ROW = torch.zeros(2, 1, HIDDEN)
NO_STATES: dict[str, object] = {"choices": [{"token_ids": [1]}], "kv_transfer_params": None}
NO_TOKEN = NO_STATES | {
    "choices": [{"token_ids": ["a"]}],
    "kv_transfer_params": {"hidden_states_path": "/nowhere/1.safetensors"},
}
GONE = {"hidden_states_path": "/nowhere/1.safetensors"}
LIES: dict[str, tuple[Answer, str]] = {
    "no states": (lambda ids, path: (200, NO_STATES), "answers without hidden states"),
    "no token": (lambda ids, path: (200, NO_TOKEN), "answers without hidden states"),
    "refusal": (lambda ids, path: (400, {"error": "too long"}), "refuses: HTTP 400: .*too long"),
    "faults": (lambda ids, path: (503, {"error": "busy"}), "sends no .*HTTP 503: .*busy"),
    "no JSON": (lambda ids, path: (200, b"<html>"), "no server of this kind: <html>"),
    "much": (lambda ids, path: (200, b" " * (2 << 20)), "more than a megabyte"),
    "no file": (lambda ids, path: (200, NO_STATES | {"kv_transfer_params": GONE}), "same path"),
    "other tokens": (lambda ids, path: written(path, ids[::-1], ROW), "want 1 layers of 32"),
    "other shape": (lambda ids, path: written(path, ids, ROW[:, :, :16]), "want 1 layers"),
    "too large": (lambda ids, path: written(path, ids, ROW.repeat(9, 1, 1)), "larger than this"),
}


@pytest.mark.parametrize(("answer", "text"), LIES.values(), ids=LIES)
def test_a_server_that_lies_is_named(answer, text, monkeypatch, tmp_path):
    monkeypatch.setattr(online, "PATIENCE_S", 0.2)
    server = Server(answer, tmp_path)
    try:
        with pytest.raises(FeaturesLost, match=f"^features: .*{text}"):
            ServedStates([server.address], [1], HIDDEN).fetch([0], [[1, 2]])
    finally:
        server.end()


def test_a_file_is_read_when_it_is_complete_and_removed(monkeypatch, tmp_path):
    def answer(ids: list[int], path: Path) -> tuple[int, object]:
        reply = written(path, ids, torch.full((2, 1, HIDDEN), 3.0))
        held = os.open(f"{path}.lock", os.O_WRONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        complete = path.read_bytes()
        path.write_bytes(complete[:20])

        def finish() -> None:
            path.write_bytes(complete)
            os.close(held)

        threading.Timer(0.2, finish).start()
        return reply

    server = Server(answer, tmp_path)
    source = ServedStates([server.address], [1], HIDDEN)
    assert source.fetch([0], [[1, 2]])["layer.1"].tolist() == [[3.0] * HIDDEN] * 2
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(online, "ANSWER_S", 0.05)
    monkeypatch.setattr(online, "PATIENCE_S", 0.0)
    with pytest.raises(FeaturesLost, match="not complete in time"):
        source.fetch([0], [[1, 2]])
    server.end()


def test_addresses_are_told_from_a_folder():
    assert online.addresses_of("http://a:1/v1, https://b") == ["http://a:1", "https://b"]
    assert online.addresses_of("out/features") == []
    with pytest.raises(ValueError, match="features: 'out/dump' is no address; give http"):
        online.addresses_of("http://a:1,out/dump")
    with pytest.raises(ValueError, match="features: 'http://a:port' is no address"):
        online.addresses_of("http://a:port")


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
            found = features.read(batch.to(torch.device("cuda:0")), [2, 4], torch.float32)
            for layer, states_BTH in states.items():
                assert torch.equal(found[layer].cpu(), states_BTH)
    num_tensors = 2 * len(source.layers)  # int8 has scales
    assert by_main == [True] * num_tensors + [False] * num_tensors
