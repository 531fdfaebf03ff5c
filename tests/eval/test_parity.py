"""`pipedraft eval parity`: every method decodes as it trains, and deliberate faults are named."""

import json

import pytest
import torch
from command_runs import assert_one_line, call
from safetensors.torch import load_file, save_file
from tiny_drafts import make_draft, make_exit, make_head, make_module
from tiny_models import byte_tokenizer, tiny_llama, write_rows

from pipedraft.inference.engine import Engine
from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.inference.sources.tree_source import TreeSource
from pipedraft.models.exchange.export import export
from pipedraft.models.stages.stage import Stage

LAYERS = 8
ANSWER = 31
"""Token repeated by most answers."""
QUESTIONS = ["1 plus 2?", "Which birds swim, and which of them fly?", "So?"]


def quiet(network, factor=0.4):
    """Scale down the layers' changes to their input."""
    for layer in network.layers:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)
    return network


HEADS = {
    "eagle": lambda target: make_head(target, "eagle"),
    "mtp": lambda target: make_head(target, "mtp"),
    "eagle3": make_head,
    "eagle3_vocabulary": lambda target: make_head(target, draft_vocab_size=200),
    "dflash": lambda target: quiet(
        make_head(target, "dflash", block_size=5, mask_token_id=ANSWER), 0.2
    ),
    "dspark": lambda target: quiet(
        make_head(target, "dspark", block_size=4, mask_token_id=ANSWER), 0.2
    ),
    "spd": lambda target: make_module(target, num_stages=4).float(),
    "spd_output_states": lambda target: make_module(
        target, num_stages=4, timing="output_states", query="all"
    ).float(),
    "spd_several_a_step": lambda target: make_module(
        target, num_stages=4, tokens_per_step=2
    ).float(),
    "ppsd": lambda target: make_exit(target, num_stages=4),
    "flexspec": lambda target: make_draft(target, feature_source="self"),
}
LAYOUTS = {"eagle": ["sglang"]} | dict.fromkeys(
    ("eagle3", "dflash", "dspark"), ["sglang", "speculators"]
)


def repeating_target(tokenizer):
    """The next token often repeats the last one, so untrained heads are accepted now and then."""
    target = tiny_llama(layers=LAYERS, vocab=len(tokenizer))
    target.lm_head.weight.copy_(target.get_input_embeddings().weight)
    quiet(target.model)
    return target


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, a checkpoint of every kind, and questions."""
    folder, tokenizer = tmp_path_factory.mktemp("parity"), byte_tokenizer()
    target = repeating_target(tokenizer)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    for name, make in HEADS.items():
        (folder / name).mkdir()
        make(target).save(folder / name)
    write_rows(folder / "own.jsonl", *({"prompt": text} for text in QUESTIONS))
    return folder


@pytest.fixture
def parity(place, monkeypatch, capsys):
    """Run the command; return its status, lines by subject, and JSON."""

    def run(head, *words, limit=3):
        found = place / "found.json"
        fixed = ["--target", place / "target", "--benchmarks", place / "own.jsonl"]
        fixed += ["--max-new-tokens", 20, "--depth", 4, "--limit", limit, "--json", found]
        words = ["parity", "--checkpoint", place / head, *fixed, *words]
        status = call("eval", [str(word) for word in words], monkeypatch)
        out, err = capsys.readouterr()
        assert not err, err
        lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
        return status, lines, json.loads(found.read_text())["parity"]

    return run


@pytest.mark.parametrize("head", HEADS)
def test_what_is_decoded_is_what_is_trained(parity, head):
    status, lines, found = parity(head)
    assert status == 0, lines
    decoded = next(check for check in found["checks"] if check["name"] == "decoding")
    first = found["positions"][0]
    assert decoded["rows"] == sum(row["reached"] for row in found["positions"]) >= first["reached"]
    assert found["positions"][1]["reached"] > 3 and decoded["ties"] == 0
    assert 0 < decoded["largest_difference"] < 1e-3, "the logits of both are looked at"
    for row in found["positions"]:
        assert row.get("there") == row.get("decoding") and row["reached"] <= row["rows"]
    assert lines["decoding"].startswith(f"equal at every one of {decoded['rows']} rows")
    assert lines["prompts"] == "equal at every one of 3 prompts"


@pytest.mark.parametrize(
    "head", ["eagle", "eagle3", "eagle3_vocabulary", "dflash", "dspark", "spd", "ppsd"]
)
def test_files_are_compared_in_every_layout_that_the_draft_has(parity, head):
    _, lines, found = parity(head, limit=1)
    layouts = LAYOUTS.get(head.partition("_")[0], [])
    rows = sum(row["rows"] for row in found["positions"])
    for layout in layouts:
        assert lines[layout].startswith(f"equal at every one of {rows} rows")
        assert all(row[layout] == row["training"] for row in found["positions"])
    assert ("files" in lines) == (not layouts)
    if not layouts:
        assert lines["files"].endswith(f"of {head} there is none")


# -- deliberate faults ----------------------------------------------------------------------


def assert_named(parity, name, words, head="eagle3", *more):
    """Assert that this check is the first to fail, and its line has these words."""
    status, lines, found = parity(head, *more)
    assert status == 1
    failed = [check["name"] for check in found["checks"] if check["first"]]
    assert failed[0] == name
    assert lines[name].startswith("differ ")
    for word in words:
        assert word in lines[name], lines[name]


def test_another_chat_template_is_named(parity, place):
    template = byte_tokenizer().chat_template.replace("<|end|>", "\n")
    byte_tokenizer(template).save_pretrained(place / "trained")
    words = [
        "first at prompt own/1: template: token 17 is ",
        "'Ċ' in training, '<|end|>' in decoding",
    ]
    assert_named(parity, "prompts", words, "eagle3", "--trained-tokenizer", place / "trained")


def test_positions_off_by_one_are_named(parity, monkeypatch):
    forward = EagleSource._forward

    def late(self, tokens, states, positions, *rest):
        drafted = len(tokens) == 1  # the text's rows come together, with the first call
        return forward(self, tokens, states, [x + drafted for x in positions], *rest)

    monkeypatch.setattr(EagleSource, "_forward", late)
    words = ["first at prompt own/1, row ", "positions: the draft's row stands at 32", "at 31 in"]
    assert_named(parity, "decoding", words)


@pytest.mark.parametrize("head", ["eagle3", "spd", "ppsd", "dflash", "eagle"])
def test_hidden_states_of_other_layers_are_named(parity, monkeypatch, head):
    run = Stage._run

    def shifted(self, hidden, positions, visible, taps, *rest, **more):
        first = self.start or -1  # a later stage does not own the states before it
        own = {x: x - 1 if x - 1 > first else x for x in taps if self.start < x <= self.end}
        hidden, found = run(self, hidden, positions, visible, {*taps, *own.values()}, *rest, **more)
        return hidden, {x: found[own.get(x, x)] for x in taps if own.get(x, x) in found}

    monkeypatch.setattr(Stage, "_run", shifted)
    words = ["hidden states: those of layer", "differ by", "they are those of layer", "trained on"]
    assert_named(parity, "decoding", words, head)


def test_rows_that_see_other_rows_are_named(parity, monkeypatch):
    forward = EagleSource._forward

    def blind(self, tokens, states, positions, cache, visible):
        visible[:, 0] &= len(tokens) > 1
        return forward(self, tokens, states, positions, cache, visible)

    monkeypatch.setattr(EagleSource, "_forward", blind)
    assert_named(parity, "decoding", ["attention: tokens, hidden states and positions are equal"])


def test_another_norm_in_decoding_is_named(parity, monkeypatch):
    decode = Engine.decode

    def scaled(self, ids):
        weight = self.draft.norm.weight
        weight.mul_(1.5)
        try:
            return decode(self, ids)
        finally:
            weight.div_(1.5)

    monkeypatch.setattr(Engine, "decode", scaled)
    assert_named(parity, "decoding", ["draft position 1: norm or LM head: "])


def test_another_vocabulary_map_in_decoding_is_named(parity, monkeypatch):
    monkeypatch.setattr(
        TreeSource, "draft_ids", property(lambda self: self.draft.draft_ids.flip(0))
    )
    assert_named(parity, "decoding", ["vocabulary map: draft id"], "eagle3_vocabulary")


def changed_files(place, layout, head, change, config=None):
    """An export with some weights and settings changed."""
    folder = place / f"{head}-{layout}-changed"
    if not folder.exists():
        export(place / head, layout, folder, target=str(place / "target"))
    weights = load_file(folder / "model.safetensors")
    weights |= change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def swapped(weights):
    """Swap the tokens of the first two draft ids."""
    d2t = weights["d2t"].clone()
    d2t[:2] = torch.tensor([d2t[1] + 1, d2t[0] - 1])
    return {"d2t": d2t}


@pytest.mark.parametrize(
    ("layout", "head", "change", "config", "words"),
    [
        (
            "sglang",
            "eagle3",
            lambda weights: {"norm.weight": weights["norm.weight"] * 1.25},
            None,
            ["draft position 1: norm: norm.weight differs by"],
        ),
        (
            "speculators",
            "eagle3_vocabulary",
            swapped,
            None,
            ["vocabulary map: draft id 0 is token 1 in the files, 0 in training"],
        ),
        (
            "speculators",
            "eagle3",
            dict,
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            ["hidden states: feature_layers is (1, 3, 4) in the files, (2, 4, 5) in training"],
        ),
        (
            "sglang",
            "eagle",
            dict,
            {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
            ["positions: rope_parameters is"],
        ),
    ],
    ids=["norm", "map", "layers", "rotation"],
)
def test_faults_of_exported_files_are_named(parity, place, layout, head, change, config, words):
    folder = changed_files(place, layout, head, change, config)
    assert_named(parity, folder.name, words, head, "--exported", folder)


def test_a_permuted_map_of_the_checkpoint_itself_is_named(parity, place):
    """Training's forward pass and decoding are equally wrong; only the ids' order gives it away."""
    folder = place / "permuted"
    folder.mkdir()
    (folder / "config.json").write_text((place / "eagle3_vocabulary/config.json").read_text())
    weights = load_file(place / "eagle3_vocabulary" / "model.safetensors")
    weights["draft_ids"] = weights["draft_ids"].flip(0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_named(parity, "checkpoint", ["at every prompt: vocabulary map: 0 of"], "permuted")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--exported", "nowhere"], ["--exported: no folder or file 'nowhere'"]),
        (["--limit", "0"], ["--limit: 0; give at least 1"]),
        (["--trained-tokenizer", "nowhere"], ["--trained-tokenizer", "nowhere"]),
    ],
)
def test_bad_input_is_one_line(place, monkeypatch, capsys, words, expected):
    fixed = ["--checkpoint", place / "eagle3", "--target", place / "target"]
    fixed += ["--benchmarks", place / "own.jsonl"]
    status = call("eval", ["parity", *map(str, fixed), *words], monkeypatch)
    assert_one_line(status, *capsys.readouterr(), expected)


def test_files_of_another_kind_are_refused(place, monkeypatch, capsys):
    folder = changed_files(place, "sglang", "eagle", dict)
    words = ["--checkpoint", place / "eagle3", "--target", place / "target", "--exported", folder]
    words += ["--benchmarks", place / "own.jsonl"]
    status = call("eval", ["parity", *map(str, words)], monkeypatch)
    assert_one_line(status, *capsys.readouterr(), ["--exported", "of type 'eagle'", "'eagle3'"])
