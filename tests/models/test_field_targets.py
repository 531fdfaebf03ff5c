"""Targets as found in the field: contexts, vocabularies, rotary positions, settings."""

import json

import pytest
import torch
from data_rows import small_tokenizer
from tiny_models import tiny_llama
from transformers import LlamaConfig

from pipedraft.chats import read_template_variables, warn_of_variables
from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.data_recipes.fitting import load_fitting
from pipedraft.inference.serving.requests import ChatRequest, parse
from pipedraft.models.heads.language_model import LanguageModelDraft
from pipedraft.models.target import StagedTarget
from pipedraft.models.transformer.layers import LayerConfig
from pipedraft.pretrained import context_length, unapplied_settings
from pipedraft.train.config import _peek_method
from pipedraft.train.methods import methods

ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}


def test_yarn_extends_the_context_that_the_file_names():
    for original, positions, expected in ((64, 64, 256), (64, 512, 512), (None, 64, 64)):
        rope = ROPE | ({"original_max_position_embeddings": original} if original else {})
        config = LlamaConfig(max_position_embeddings=positions)
        config.rope_parameters = rope
        assert context_length(config) == expected


def test_a_head_of_a_longrope_target_is_refused_in_one_line():
    config = tiny_llama().config
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_type 'longrope' .* no draft head does"):
        LayerConfig.from_target(config)


@pytest.mark.parametrize("rows", [20, 28])
def test_rows_that_no_token_has_do_not_part_draft_and_target(rows):
    target, model = tiny_llama(vocab=24), tiny_llama(layers=1, vocab=rows)
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits[0]
    draft = LanguageModelDraft(model, target, 18)
    shared = min(rows, 24)
    assert draft.draft_ids.tolist() == list(range(shared)) and draft.target_vocab_size == 24
    hidden = model.get_decoder()(ids, output_hidden_states=True).hidden_states[-1]
    logits = model.lm_head(hidden)[0, :, :shared]
    torch.testing.assert_close(logits, expected[:, :shared])
    assert draft.logits(torch.zeros(2, 32)).shape == (2, shared)
    assert len(model.get_input_embeddings().weight) == max(rows, 24)
    for known in (None, shared + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            LanguageModelDraft(tiny_llama(layers=1, vocab=rows), target, known)


def test_a_token_beyond_the_embedding_is_named():
    target = StagedTarget(tiny_llama(vocab=24), 2)
    with pytest.raises(ValueError, match="token 24 is beyond the target's 24 embeddings"):
        target.prefill(torch.tensor([3, 24]))


def test_rows_beyond_the_positions_are_cut_and_told(tmp_path, capsys):
    tokenizer = small_tokenizer(tmp_path)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(LINE % number for number in range(4)))
    config = DataConfig(
        sources=[Source(path=str(path))], cache_dir=str(tmp_path / "cache"), valid_fraction=0
    )
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    data = load_fitting(config, tokenizer, LlamaConfig(**sizes))
    assert max(map(len, data.train["input_ids"])) == 64
    said = capsys.readouterr().err
    assert "2048 is above the target's 64 positions; longer rows are cut (4" in said
    with pytest.raises(ValueError, match="a row has token"):
        load_fitting(config, tokenizer, LlamaConfig(**sizes | {"vocab_size": 9}))


LINE = (
    '{"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "'
    + "ok " * 99
    + '%d"}]}\n'
)


def test_settings_of_generation_that_are_not_applied_are_told():
    model = tiny_llama()
    assert unapplied_settings(model) == []
    model.generation_config.repetition_penalty = 1.1
    (line,) = unapplied_settings(model)
    assert "repetition_penalty 1.1, which is not applied" in line


def test_the_last_method_counts():
    given = ["--method", "eagle3", "--method=ppsd"]
    assert _peek_method(given, list(methods()), None) == "ppsd"


def test_a_draft_of_other_template_variables_is_told(capsys):
    assert read_template_variables('{"enable_thinking": false}') == {"enable_thinking": False}
    for wrong in ("[]", "no", '{"tokenize": false}'):
        with pytest.raises(ValueError):
            read_template_variables(wrong)
    trained = {"training": {"data": {"chat_template_kwargs": {"enable_thinking": False}}}}
    warn_of_variables("out/head", trained, {"enable_thinking": False})
    warn_of_variables("out/head", {"training": {}}, {"enable_thinking": False})
    assert capsys.readouterr().err == ""
    warn_of_variables("out/head", trained, None)
    assert "out/head was trained with" in capsys.readouterr().err


def test_a_request_may_set_template_variables():
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for given in ({"enable_thinking": False}, {}):
        asked = parse(json.dumps(body | {"chat_template_kwargs": given}).encode(), ChatRequest)[0]
        assert asked.chat_template_kwargs == given
