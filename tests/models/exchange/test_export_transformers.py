"""DFlash heads in transformers' own `generate`: the same outputs, draft tokens and acceptance."""

import json

import pytest
import torch
from command_runs import assert_one_line, call
from tiny_drafts import make_head
from tiny_models import byte_tokenizer, tiny_llama
from transformers import AutoModel

from pipedraft.eval.parity_rows import Decoding
from pipedraft.eval.transformers_process import decode
from pipedraft.models.exchange.export import export

MASK = 31
PROMPTS = [[5, 9, 17, 80, 81, MASK], [33, 34, 35, 33, MASK]]
NEW = 20
CHAT = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def place(tmp_path):
    target = tiny_llama(layers=8, vocab=len(byte_tokenizer()))
    target.lm_head.weight.copy_(target.get_input_embeddings().weight)
    for layer in target.model.layers:  # the last token often comes again
        layer.self_attn.o_proj.weight.mul_(0.4)
        layer.mlp.down_proj.weight.mul_(0.4)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    options = {"block_size": 5, "feature_layers": (5, 2, 4), "mask_token_id": MASK}
    head = make_head(target, "dflash", **options)
    head.attach(target)
    for layer in head.layers:  # a masked row often drafts the mask's token
        layer.self_attn.o_proj.weight.mul_(0.3)
        layer.mlp.down_proj.weight.mul_(0.3)
    (tmp_path / "head").mkdir()
    head.save(tmp_path / "head")
    return tmp_path, target, head


def test_generate_drafts_and_accepts_what_we_do(place):
    folder, target, head = place
    export(folder / "head", "transformers", folder / "out", target=str(folder / "target"))
    request = {
        "target": str(folder / "target"),
        "dtype": "float32",
        "max_new_tokens": NEW,
        "speculative_config": {"model": str(folder / "out"), "num_speculative_tokens": 4},
        "prompts": [{"prompt_ids": ids, "messages": CHAT} for ids in PROMPTS],
    }
    answer = decode(request)
    decoding = Decoding(target, byte_tokenizer(), head, depth=4, max_new_tokens=NEW)
    accepted = torch.zeros(4, dtype=torch.long)
    for ids, run in zip(PROMPTS, answer["runs"], strict=True):
        with torch.inference_mode():
            out, drafted = decoding.run(ids)
        assert run["token_ids"] == out
        rounds = {one["root"]: one["drafted"] for one in run["rounds"]}
        ours = [one for one in drafted if one.root in rounds]
        assert len(ours) > 12
        for one in ours:
            assert rounds[one.root][one.depth - 1] == one.token
        counts = decoding.result.position_accepts
        accepted[: len(counts)] += torch.tensor(counts)
    assert answer["accepted"] == accepted.tolist()
    assert accepted[0] > 0


def test_the_files_are_of_the_class_that_reads_them(place):
    folder, _, head = place
    export(folder / "head", "transformers", folder / "out", target=str(folder / "target"))
    model, info = AutoModel.from_pretrained(folder / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.target_layer_ids == [1, 3, 4]  # outputs, in ascending order
    assert (
        model.config.rope_parameters["rope_theta"]
        == head.layer_config.rope_parameters["rope_theta"]
    )
    assert torch.equal(
        model.layers[0].self_attn.q_proj.weight, head.layers[0].self_attn.q_proj.weight
    )


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("dflash", {"draft_vocab_size": 100}, ["model.draft_vocab_size 100", "another --format"]),
        ("dspark", {}, ["'dspark'", "transformers is for dflash"]),
    ],
)
def test_what_the_class_has_no_place_for_is_refused(
    place, monkeypatch, capfd, kind, options, words
):
    folder, target, _ = place
    (folder / "other").mkdir()
    make_head(target, kind, **options).save(folder / "other")
    line = ["export", "--checkpoint", str(folder / "other"), "--out", str(folder / "out")]
    line += ["--format", "transformers", "--target", str(folder / "target")]
    status = call("models", line, monkeypatch)
    assert_one_line(status, *capfd.readouterr(), words)


def test_a_scaled_embedding_is_refused(place, monkeypatch, capfd):
    folder, _, _ = place
    path = folder / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma2"}))
    line = ["export", "--checkpoint", str(folder / "head"), "--out", str(folder / "out")]
    line += ["--format", "transformers", "--target", str(folder / "target")]
    status = call("models", line, monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["gemma2", "embedding", "another --format"])
