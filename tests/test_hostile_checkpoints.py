"""Checkpoints whose claims exceed their files: one line, nothing allocated."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafts import make_draft, make_exit, make_head, make_module
from tiny_models import tiny_llama

from pipedraft.inference.command import describe
from pipedraft.inference.decode_options import DecodeOptions
from pipedraft.models.exchange.card import CardSource, render_card
from pipedraft.models.heads.draft import load_untied, read_description

VALUES = [-1, 0, 1, 7, 10**7, 10**12, 2**80, 0.5, 1e300, True, "x", "", None, [], {}, [7, "x"]]
TRAINING = {
    "data": {"tokens": 9, "sources": {"x": {"rows_kept": 1, "tokens": 9}}, "licenses": {"mit": 1}},
    "metrics": {"score": 0.5},
    "imported": {"from": "x"},
}
MAKERS = {
    "spd": lambda target: make_module(target).float(),
    "eagle": lambda target: make_head(target, "eagle"),
    "eagle3": make_head,
    "mtp": lambda target: make_head(target, "mtp"),
    "dflash": lambda target: make_head(target, "dflash"),
    "dspark": lambda target: make_head(target, "dspark"),
    "ppsd": make_exit,
    "flexspec": make_draft,
}


def assert_loads_or_refuses(load: Any, what: str) -> bool:
    """Load or refuse; return True if refused."""
    try:
        load()
    except ValueError as error:
        line = str(error)
        assert line.count("\n") == 0 and len(line) < 1500, (what, line)
        return True
    return False


def places(description: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object in a description, with each of its keys."""
    for key, value in description.items():
        yield description, key
        if isinstance(value, dict):
            yield from places(value)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.usefixtures("little_memory")
def test_no_value_in_a_checkpoints_description_is_believed(kind, tmp_path):
    MAKERS[kind](tiny_llama(layers=4, vocab=32)).save(tmp_path)
    path = tmp_path / "config.json"
    whole = path.read_bytes()
    refused = total = 0

    def load() -> None:
        describe(DecodeOptions(checkpoint=str(tmp_path), prompt="x"))
        load_untied(tmp_path)

    assert not assert_loads_or_refuses(load, kind)
    for index in range(sum(1 for _ in places(json.loads(whole)))):
        for value in VALUES:
            description = json.loads(whole)
            where, key = list(places(description))[index]
            where[key] = value
            path.write_text(json.dumps(description))
            refused += assert_loads_or_refuses(load, f"{kind} {key} = {value!r}")
            total += 1
    assert total > 200 and refused > total / 2


def test_no_value_in_the_record_of_a_training_is_believed(tmp_path):
    make_head(tiny_llama(layers=4, vocab=32)).save(tmp_path, training=TRAINING)
    path = tmp_path / "config.json"
    whole, refused = path.read_bytes(), 0

    def show() -> None:
        render_card(CardSource(description=read_description(tmp_path)))

    show()
    for index in range(sum(1 for _ in places({"training": TRAINING}))):
        for value in VALUES:
            description = json.loads(whole)
            where, key = list(places({"training": description["training"]}))[index]
            (description if key == "training" else where)[key] = value
            path.write_text(json.dumps(description))
            refused += assert_loads_or_refuses(show, f"{key} = {value!r}")
    assert refused > 60


@pytest.mark.parametrize(
    "content",
    [b"[" * 10**6, b"null", b'"x"', b"NaN", b"", b"\xff", b'{"draft_type": []}', b" " * 2**23,
     b'{"draft_type": "spd", "draft_type": "eagle3"}', b'{"a": ' * 10**5],
)  # fmt: skip
def test_a_description_is_an_object_of_bounded_size(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="^checkpoint: "):
        read_description(tmp_path)


def change(tensors: dict[str, torch.Tensor], what: str) -> None:
    name = next(name for name, value in tensors.items() if value.is_floating_point())
    if what == "missing":
        del tensors[name]
    elif what == "unexpected":
        tensors["more"] = torch.zeros(1)
    elif what == "nan":
        tensors[name].view(-1)[0] = math.nan
    elif what == "infinite":
        tensors[name].view(-1)[-1] = -math.inf
    elif what == "shape":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors["draft_ids"][0] = {"negative id": -1, "id outside": 10**6}[what]


@pytest.mark.parametrize(
    "what", ["missing", "unexpected", "nan", "infinite", "shape", "negative id", "id outside"]
)
def test_weights_that_no_training_writes_are_refused(what, tmp_path):
    make_head(tiny_llama(layers=4, vocab=32)).save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    change(tensors, what)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"^checkpoint: .*model\.safetensors"):
        load_untied(tmp_path)
