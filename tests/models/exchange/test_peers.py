"""Imported heads return the logits computed by formulas from their files, and export unchanged."""

# R rows of a text but its last token, H hidden, U draft vocabulary

import shutil

import pytest
import torch
from command_runs import assert_one_line, call
from decode_runs import CHAIN, engine_for, greedy_reference
from peer_files import (
    DRAFT_IDS,
    IDS,
    LENGTH,
    STEPS,
    VOCABULARY,
    assert_refused,
    assert_same_head,
    command,
    eagle3_files,
    eagle_files,
    import_files,
    save_target,
    write,
)
from peer_formulas import steps_by_formula
from safetensors.torch import load_file
from tiny_drafts import step_logits

from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.models import load_draft
from pipedraft.models.exchange.export import export
from pipedraft.models.exchange.peers import import_head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


QWEN = ("q_norm", "k_norm")
HEADS = {
    "safeailab_eagle3": lambda: eagle3_files("sglang"),
    "sglang_full": lambda: eagle3_files("sglang", ids=torch.arange(VOCABULARY)),
    "sglang_layers": lambda: eagle3_files(
        "sglang", flags={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    ),
    "sglang_biases": lambda: eagle3_files("sglang", biases=True),
    "speculators": lambda: eagle3_files("speculators"),
    "before_residual": lambda: eagle3_files("speculators", flags={"norm_before_residual": True}),
    "before_fc": lambda: eagle3_files("speculators", flags={"norm_before_fc": True}),
    "eagle_3_1": lambda: eagle3_files("speculators", flags={"fc_norm": True, "norm_output": True}),
    "qwen3": lambda: eagle3_files("speculators", norms=QWEN),
    "eagle": eagle_files,
    "eagle_no_bias": lambda: eagle_files(bias=False),
    "eagle_biases": lambda: eagle_files(biases=True),
}


@pytest.mark.parametrize("name", HEADS)
def test_an_imported_head_computes_what_its_files_say(tmp_path, target, name):
    """Compare every logit over seven draft tokens; the file has the embedding, as most do."""
    config, weights = HEADS[name]()
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight
    pickled = name in ("eagle", "safeailab_eagle3")
    folder = import_files(tmp_path, target, config, weights, pickled=pickled)
    head = load_draft(str(folder), target)
    expected = steps_by_formula(target, config, weights)
    for step, (theirs, ours) in enumerate(
        zip(expected, step_logits(target, head, IDS, STEPS), strict=True)
    ):
        rows = LENGTH - 1 - step
        difference = (theirs - ours)[:rows].abs().max() / theirs.abs().max()
        assert difference < 1e-5, (step, float(difference))
    if "d2t" in weights:
        assert torch.equal(head.draft_ids, DRAFT_IDS)
    result = engine_for(
        target, draft=head, schedule="eagle", tree=CHAIN, num_stages=2, max_new_tokens=12
    ).decode([3, 1, 4])
    assert result.token_ids == greedy_reference(target, [3, 1, 4], 12)


def is_zero_bias(key, value) -> bool:
    """Match the zero bias that engines have in every EAGLE-1 head."""
    return key.endswith(("fc.bias", "o_proj.bias")) and not value.any()


@pytest.mark.parametrize("name", [name for name in HEADS if name != "sglang_biases"])
def test_an_imported_head_goes_back_as_it_came(tmp_path, target, name):
    """Tensor by tensor; maps and the embedding are written if they were left out."""
    config, weights = HEADS[name]()
    layout = "speculators" if "speculators_model_type" in config else "sglang"
    export(import_files(tmp_path, target, config, weights), layout, tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    added = {key for key in found.keys() - weights.keys() if not is_zero_bias(key, found[key])}
    assert added <= {"d2t", "t2d", "embed_tokens.weight"}
    for key, value in weights.items():
        assert torch.equal(found[key], value), key
    import_head(str(tmp_path / "back"), str(target.folder), tmp_path / "again")
    assert_same_head(tmp_path / "ours", tmp_path / "again")


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_is_as_wide_when_decoding(tmp_path, target, window):
    """Draft tokens equal a windowless head's with old rows hidden."""
    inner = {"layer_types": ["sliding_attention"], "sliding_window": window}
    config, weights = eagle3_files("speculators", flags={"inner": inner})
    head = load_draft(str(import_files(tmp_path, target, config, weights)), target)
    assert head.window == window
    seen = []
    step = type(head).step

    def spied(self, *rows, positions_R, caches, visible_RC):
        seen.append((positions_R, visible_RC))
        return step(self, *rows, positions_R, caches, visible_RC)

    type(head).step = spied
    try:
        options = {"schedule": "eagle", "tree": CHAIN, "num_stages": 2, "max_new_tokens": 8}
        result = engine_for(target, draft=head, **options).decode(IDS.tolist())
    finally:
        type(head).step = step
    assert result.token_ids == greedy_reference(target, IDS.tolist(), 8)
    positions, visible = seen[0]
    assert visible.sum(1).tolist() == [min(int(p) + 1, window) for p in positions]
    # A chain below the text: every row sees the last positions, its own included.
    assert all(v.sum(1).tolist() == [min(int(x) + 1, window) for x in p] for p, v in seen[:3])


def test_decoding_without_the_window_is_noticed(tmp_path, target, monkeypatch):
    monkeypatch.setattr(EagleSource, "_within_window", lambda *_: torch.tensor(True))
    with pytest.raises(AssertionError, match=r"assert \[1, 2, 3, 4"):
        test_a_window_is_as_wide_when_decoding(tmp_path, target, 3)


# -- refusals -------------------------------------------------------------------------------


def edited(**changes):
    return lambda config, weights: config.update(changes)


def without(name):
    return lambda config, weights: weights.pop(name)


def replaced(name, value):
    return lambda config, weights: weights.update({name: value})


REFUSED = {
    "two layers": ("sglang", edited(num_hidden_layers=2), ["num_hidden_layers", "2"]),
    "activation": ("sglang", edited(hidden_act="gelu"), ["hidden_act", "'gelu'"]),
    "raw logits": ("sglang", edited(norm_output=False), ["norm_output"]),
    "other width": ("sglang", edited(target_hidden_size=64), ["target_hidden_size", "64"]),
    "no features": (
        "sglang",
        edited(eagle_config={"use_aux_hidden_state": False}),
        ["use_aux_hidden_state", "False"],
    ),
    "too deep": (
        "speculators",
        edited(eagle_aux_hidden_state_layer_ids=[1, 2, 99]),
        ["layer_ids", "99", "8 layers"],
    ),
    "rope": (
        "sglang",
        edited(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        ["rope_scaling", "dynamic", "known types"],
    ),
    "huge": ("sglang", edited(intermediate_size=10**9), ["intermediate_size", "1000000000"]),
    "no head": ("sglang", without("lm_head.weight"), ["draft_vocab_size", "22"]),
    "no map": ("sglang", without("d2t"), ["lacks d2t", "22"]),
    "map": ("sglang", replaced("d2t", torch.zeros(22).long() + 60), ["d2t", "60"]),
    "other map": ("sglang", replaced("t2d", torch.ones(64).bool()), ["t2d", "64"]),
    "missing": ("sglang", without("midlayer.mlp.up_proj.weight"), ["lacks", "mlp.up_proj"]),
    "unknown": ("sglang", replaced("adapter.weight", torch.zeros(1)), ["tensor", "adapter.weight"]),
    "nan": ("sglang", replaced("norm.weight", torch.full((32,), torch.nan)), ["norm.weight"]),
    "embedding": (
        "sglang",
        replaced("embed_tokens.weight", torch.zeros(64, 32)),
        ["embed_tokens.weight", "not the target's"],
    ),
    "family": (
        "speculators",
        lambda config, weights: config["transformer_layer_config"].update(model_type="gpt2"),
        ["transformer_layer_config", "llama, qwen2, qwen3"],
    ),
    "typed": ("sglang", edited(norm_before_fc="yes"), ["config.json", "norm_before_fc"]),
    "output bias": (
        "sglang",
        replaced("midlayer.self_attn.o_proj.bias", torch.zeros(32)),
        ["tensor", "o_proj.bias"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(tmp_path, target, name, monkeypatch, capfd):
    layout, change, words = REFUSED[name]
    config, weights = eagle3_files(layout)
    change(config, weights)
    assert_refused(tmp_path, target, config, weights, words, monkeypatch, capfd)


class Evil:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"fc.weight": Evil()}, ["damaged or holds more than tensors"]),
        ([1, 2], ["holds a list"]),
        ({"fc.weight": 3}, ["'fc.weight'", "no plain tensor"]),
        ({"fc.weight": torch.zeros(1).expand(10**9)}, ["'fc.weight'", "no plain tensor"]),
        ({}, ["no head that is known"]),
        (None, ["damaged"]),
    ],
    ids=["code", "list", "number", "expanded", "empty", "noise"],
)
def test_pickled_files_are_read_as_tensors_or_refused(
    tmp_path, target, content, words, monkeypatch, capfd
):
    source = tmp_path / "head.pt"
    torch.save(content, source)
    if content is None:
        source.write_bytes(b"\x80\x02noise")
    status = call("models", command(source, target, tmp_path / "out"), monkeypatch)
    out, error = capfd.readouterr()
    assert "ran" not in out
    assert_one_line(status, out, error, ["--from", *words])


def test_a_damaged_safetensors_file_is_refused(tmp_path, target, monkeypatch, capfd):
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"noise")
    status = call("models", command(source, target, tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", "model.safetensors", "damaged"])


def test_a_folder_without_a_head_and_a_file_in_several_are_refused(
    tmp_path, target, monkeypatch, capfd
):
    (tmp_path / "empty").mkdir()
    status = call("models", command(tmp_path / "empty", target, tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", "no weights", "give"])
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.pt", "b.pt"):
        torch.save({}, two / name)
    status = call("models", command(two, target, tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", "2 files", "b.pt", "give one"])
    missing = tmp_path / "nowhere"
    status = call("models", command(missing, target, tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", "nowhere", "user/name"])


def test_the_command_prints_how_to_decode_and_the_refusal_of_a_peers_folder_names_it(
    tmp_path, target, monkeypatch, capfd
):
    source = write(tmp_path / "head", *eagle_files())
    arguments = ["--checkpoint", str(source), "--target", str(target.folder), "--prompt", "a"]
    status = call("inference", arguments, monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["checkpoint", "pipedraft models import --from"])
    assert call("models", command(source, target, tmp_path / "out"), monkeypatch) == 0
    assert "pipedraft inference --checkpoint" in capfd.readouterr().out.splitlines()[-1]
    assert "Imported from" in (tmp_path / "out" / "README.md").read_text()
    shutil.rmtree(tmp_path / "out")
