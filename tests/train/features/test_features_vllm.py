"""`train.features --engine vllm`: the dump holds the engine's states.

The engine is a process that answers like vLLM's server and writes files like its connector. A state
is its token plus a thousand times its layer.
"""

import json
import sys
from pathlib import Path

import feature_runs
import pytest
from feature_runs import HIDDEN, METHODS
from safetensors.torch import load_file

from pipedraft.errors import Failure
from pipedraft.train.features import __main__ as command
from pipedraft.train.features import online
from pipedraft.train.features.online import FeaturesLost
from pipedraft.train.features.vllm import VllmStates, states_request

world = feature_runs.world
FAKE = """#!{python}
import array, http.server, json, os, pathlib, struct, sys, threading, uuid
request, folder = map(pathlib.Path, sys.argv[3:])
request = json.loads(request.read_text())
layers, hidden, settings = request["layers"], {hidden}, request["settings"]
if settings["dtype"] != "float32":
    sys.exit("ValueError: unknown dtype")
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"data": [{{"id": "target"}}]}})

    def do_POST(self):
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        states = array.array("f")
        for token in ids:
            for layer in layers:
                states.extend([token + 1000.0 * layer] * hidden)
        said = array.array("q", ids if {honest} else ids[::-1])
        end = 4 * len(states)
        header = {{
            "hidden_states": {{"dtype": "F32", "shape": [len(ids), len(layers), hidden],
                               "data_offsets": [0, end]}},
            "token_ids": {{"dtype": "I64", "shape": [len(ids)],
                           "data_offsets": [end, end + 8 * len(ids)]}},
        }}
        head = json.dumps(header).encode()
        path = folder / f"{{uuid.uuid4()}}.safetensors"
        path.write_bytes(struct.pack("<Q", len(head)) + head + states.tobytes() + said.tobytes())
        pathlib.Path(f"{{path}}.lock").touch()
        files = {{"hidden_states_path": str(path)}}
        self.reply({{"kv_transfer_params": files, "choices": [{{"token_ids": [0]}}]}})

    def reply(self, payload):
        data = json.dumps(payload).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer((settings["host"], settings["port"]), Handler).serve_forever()
"""


def fake(folder: Path, *, honest: bool = True) -> Path:
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, hidden=HIDDEN, honest=honest))
    path.chmod(0o755)
    return path


def test_a_dump_holds_what_the_engine_writes(world, tmp_path, monkeypatch):
    arguments = world.arguments("spd", tmp_path / "run", **METHODS["spd"])
    words = ["--engine", "vllm", "--engine-python", str(fake(tmp_path)), "--dtype", "fp32"]
    out = tmp_path / "dump"
    monkeypatch.setattr(sys, "argv", ["features", *arguments, *words, "--out", str(out)])
    command.main()
    index = json.loads((out / "index.json").read_text())
    (shard,) = [load_file(path) for path in out.glob("*.safetensors")]
    first, *others = index["settings"]["layers"]
    tokens = shard[f"layer.{first}"] - 1000 * first
    assert tokens.shape == (sum(index["shard_tokens"]), HIDDEN) and bool((tokens >= 0).all())
    for layer in others:
        assert bool((shard[f"layer.{layer}"] - 1000 * layer == tokens).all())


def engine(python: Path, dtype: str = "float32") -> VllmStates:
    request = states_request("x/y", [4, 2], dtype=dtype, max_length=16, on_cpu=True)  # type: ignore[arg-type]
    return VllmStates(python, request, HIDDEN)


def test_layers_and_rows_keep_their_places_and_files_are_removed(tmp_path):
    states = engine(fake(tmp_path))
    found = states.of([[5, 6], [7]], [4, 2])
    assert found[4][:, 0].tolist() == [4005.0, 4006.0, 4007.0]
    assert found[2][:, 0].tolist() == [2005.0, 2006.0, 2007.0]
    assert not list(Path(states._place.name).glob("*.safetensors*"))
    states.close()
    assert states._process.returncode == 0  # ended with its input


def test_an_engine_that_fails_says_why(tmp_path, monkeypatch):
    with pytest.raises(Failure, match="vllm: ValueError: unknown dtype"):
        engine(fake(tmp_path), "bfloat16")
    states = engine(fake(tmp_path, honest=False))
    with pytest.raises(FeaturesLost, match="for the row's 2 tokens"):
        states.of([[5, 6]], [2])
    states._process.kill()
    states._process.wait()
    monkeypatch.setattr(online, "PATIENCE_S", 0.0)
    with pytest.raises(Failure, match="vllm: "):
        states.of([[5, 6]], [2])
    states.close()
