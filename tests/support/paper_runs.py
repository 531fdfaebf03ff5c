"""The papers' tables on a tiny target and tiny drafts, as tests of every kind of table run them."""

import io
import json
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from eval_runs import PROMPTS
from scripts import load_script
from tiny_drafts import make_draft, make_exit, make_head, make_module
from train_runs import make_world

from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.pretrained import quieten

TABLE = load_script("benchmarks/papers/table.py")
KINDS, ROWS, SPEC = (
    load_script(f"benchmarks/papers/{name}.py") for name in ("kinds", "rows", "spec")
)
check, read_spec, table_names = KINDS.check, SPEC.read_spec, SPEC.table_names
NEW_TOKENS = 3


def planted(tmp_path: Path, name: str, edit) -> None:
    """Read and check a declaration with a planted fault."""
    content = yaml.safe_load(SPEC.table_files()[name].read_text())
    edit(content)
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    check(name, read_spec(str(path)))


def save(network, folder: Path) -> None:
    folder.mkdir(parents=True)
    network.save(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, prompts, and a draft for every role possible with four layers."""
    quieten()
    folder = tmp_path_factory.mktemp("papers")
    path = make_world(folder).target
    target, runs = load_target(str(path)), folder / "runs"
    for query in ("newest", "all"):
        name = "spd_n4" if query == "newest" else "spd_n4_all"
        module = make_module(target, num_stages=4, num_layers=1, query=query).float()
        save(module, runs / name / "best")
    save(make_module(target, num_stages=4, num_layers=2).float(), runs / "spd_n4_ls2")
    save(make_exit(target, num_stages=4), runs / "ppsd_n4")
    save(make_head(target, "eagle"), runs / "eagle")
    save(make_head(target), runs / "eagle3")
    save(make_draft(target), runs / "flexspec")
    save(make_draft(target, preset="paper"), runs / "flexspec_paper")
    model = load_target(str(path))
    torch.manual_seed(0)
    for weight in model.model.layers[0].parameters():
        weight.add_(0.05 * torch.randn(weight.shape))
    model.save_pretrained(runs / "draft_model")
    load_tokenizer(str(path)).save_pretrained(runs / "draft_model")
    for file, row in PROMPTS.items():
        (folder / "prompts" / file).parent.mkdir(parents=True)
        (folder / "prompts" / file).write_text(json.dumps(row) + "\n")
    return folder


def words(place: Path, name: str, out: Path, *more: str) -> list[str]:
    found = [name, "--target", str(place / "target"), "--data-dir", str(place / "prompts")]
    found += ["--checkpoints", str(place / "runs"), "--limit", "1", "--out", str(out)]
    return [*found, "--max-new-tokens", str(NEW_TOKENS), *more]


@pytest.fixture(scope="module")
def write(place):
    """Folder written by the command for a table, and its printed output."""

    @cache
    def written(name: str) -> tuple[Path, str]:
        out = place / "written" / name
        with redirect_stdout(io.StringIO()) as said:
            TABLE.run(words(place, name, out))
        return out, said.getvalue()

    return written


def check_written(name: str, out: Path, printed: str) -> Any:
    """Check a table's files and what the command printed. Return its specification."""
    text = (out / "table.md").read_text()
    table, content = read_spec(name), json.loads((out / "table.json").read_text())
    assert table.title in printed and f"# {table.title}" in text
    assert "differs: " in printed and "- differs: " in text
    for source in table.sources.values():
        assert source in text and source in printed
    assert [row["name"] for row in content["rows"]] == [row.name for row in table.rows]
    pairs = zip(table.rows, content["rows"], strict=True)
    assert all(row.remark in found["remark"] for row, found in pairs)
    assert content["sources"] == table.sources
    assert any(row["ours"][table.measures[0]]["value"] for row in content["rows"])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["command"].startswith(f"python benchmarks/papers/table.py {name} ")
    return table
