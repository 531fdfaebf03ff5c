"""`train.features --engine vllm`: the dump holds the engine's states.

The engine is a process that speaks the script's lines and writes files like vLLM's connector. A
state is its token plus a thousand times its layer.
"""

import json
import sys
from pathlib import Path

import feature_runs
import pytest
from feature_runs import HIDDEN, METHODS
from safetensors.torch import load_file

from pipedraft.cli import Failure
from pipedraft.train.features import __main__ as command
from pipedraft.train.features.vllm import VllmStates, states_request

world = feature_runs.world
FAKE = """#!{python}
import array, json, pathlib, struct, sys
task, request, folder = sys.argv[2:]
request = json.loads(pathlib.Path(request).read_text())
pathlib.Path(folder).mkdir()
layers, hidden = request["layers"], {hidden}
if request["dtype"] != "float32":
    sys.exit("ValueError: unknown dtype")
for number, line in enumerate(sys.stdin):
    paths = []
    for place, ids in enumerate(json.loads(line)):
        states = array.array("f")
        for token in ids:
            for layer in layers:
                states.extend([token + 1000.0 * layer] * hidden)
        said = array.array("q", ids if {honest} else ids[::-1])
        sizes = 4 * len(states), 8 * len(ids)
        ends = sizes[0], sum(sizes)
        header = {{
            "hidden_states": {{"dtype": "F32", "shape": [len(ids), len(layers), hidden],
                               "data_offsets": [0, ends[0]]}},
            "token_ids": {{"dtype": "I64", "shape": [len(ids)], "data_offsets": list(ends)}},
        }}
        head = json.dumps(header).encode()
        path = pathlib.Path(folder) / f"{{number}}-{{place}}.safetensors"
        data = struct.pack("<Q", len(head)) + head + states.tobytes() + said.tobytes()
        path.write_bytes(data)
        pathlib.Path(f"{{path}}.lock").touch()
        paths.append(str(path))
    print(json.dumps(paths), flush=True)
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
    return VllmStates(python, request)


def test_layers_and_rows_keep_their_places_and_files_are_removed(tmp_path):
    states = engine(fake(tmp_path))
    found = states.of([[5, 6], [7]], [4, 2])
    assert found[4][:, 0].tolist() == [4005.0, 4006.0, 4007.0]
    assert found[2][:, 0].tolist() == [2005.0, 2006.0, 2007.0]
    assert not list(Path(states._place.name, "rows").iterdir())
    states.close()


@pytest.mark.parametrize(
    ("honest", "dtype", "said"),
    [(False, "float32", "states of other tokens"), (True, "bfloat16", "ValueError: unknown dtype")],
)
def test_an_engine_that_fails_says_why(tmp_path, honest, dtype, said):
    states = engine(fake(tmp_path, honest=honest), dtype)
    with pytest.raises(Failure, match=said):
        states.of([[5, 6]], [2])
    states.close()
