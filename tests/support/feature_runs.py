"""Hidden-state dumps from a small world, for tests that train from them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_runs import World, make_world

from pipedraft.pretrained import quieten
from pipedraft.train.features import __main__ as command

ROWS = {"data__valid_fraction": 0.3}
METHODS: dict[str, dict[str, Any]] = {
    "spd": {"model__num_stages": 4, **ROWS},
    "ppsd": {"model__num_stages": 2, **ROWS},
    "eagle": ROWS,
    "eagle3": ROWS,
    "mtp": ROWS,
    "dflash": ROWS,
    "dspark": ROWS,
    "flexspec": ROWS,
}
HIDDEN = 32
SHARD_MB = 0.25


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    quieten()
    return make_world(tmp_path_factory.mktemp("world"))


def write_config(world: World, method: str, path: Path, **changes: Any) -> Path:
    """Write the YAML for a run of ``world``."""
    nested: dict[str, Any] = {}
    for word in world.arguments(method, path.parent / "run", **METHODS[method] | changes):
        name, value = word.removeprefix("--").split("=", 1)
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(nested))
    return path


def dump(world: World, out: Path | None, monkeypatch, *options: str, **changes: Any) -> None:
    """Run the dump command for all heads."""
    changes = METHODS["spd"] | changes
    arguments = world.arguments("spd", world.folder / "run", **changes)
    for method in ("ppsd", "eagle", "eagle3", "mtp", "dflash", "dspark", "flexspec"):
        if not (world.folder / f"{method}.yaml").exists():
            write_config(world, method, world.folder / f"{method}.yaml")
        arguments += ["--also", str(world.folder / f"{method}.yaml")]
    arguments += ["--out", str(out)] if out is not None else []
    arguments += ["--shard_mb", str(SHARD_MB), *options]
    monkeypatch.setattr(sys, "argv", ["features", *arguments])
    command.main()


@pytest.fixture(scope="module")
def dumps(world, tmp_path_factory) -> dict[str, Path]:
    """One dump per dtype."""
    folder = tmp_path_factory.mktemp("dumps")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for dtype in ("fp32", "bf16", "int8"):
            dump(world, folder / dtype, monkeypatch, "--dtype", dtype)
    return {path.name: path for path in folder.iterdir()}
