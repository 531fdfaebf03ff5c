"""A target like Qwen3 with optional thinking in its template: trained, evaluated and served with
thinking and without."""

import json
from pathlib import Path

import pytest
import torch
from eval_runs import status
from http_runs import serving
from small_tokenizers import train_tokenizer
from tiny_models import tiny_qwen3
from train_runs import World
from transformers import AutoTokenizer

from pipedraft.chats import encode_chat
from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.models import load_draft
from pipedraft.models.target import load_target

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if m['role'] == 'assistant' and loop.last and enable_thinking is not false %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n' }}{% endif %}"
    "{% if m['role'] == 'assistant' and loop.last and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n' }}{% endif %}"
    "{{ m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"
)
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
NAMES = {"on": ON, "off": OFF}
NEW = 12


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("thinking")
    data = folder / "chat.jsonl"
    with data.open("w") as lines:
        for i in range(40):
            turns = [
                {"role": "user", "content": f"What is {i} plus 2?"},
                {"role": "assistant", "content": f"{i + 2}", "reasoning_content": f"add 2 to {i}"},
            ]
            lines.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = train_tokenizer(DataConfig(sources=[Source(path=str(data))]), 300)
    tokenizer.chat_template = TEMPLATE
    target = tiny_qwen3(vocab=len(tokenizer))
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text('{"prompt": "What is 7 plus 2?"}\n{"prompt": "Why?"}\n')
    return World(folder, data, folder / "target")


@pytest.fixture(scope="module")
def heads(world) -> dict[str, Path]:
    found = {}
    for name, variables in NAMES.items():
        changes = {"data__chat_template_kwargs": json.dumps(variables), "max_steps": 2}
        out = world.folder / name
        world.trainer("eagle3", out, model__num_steps=2, **changes).run()
        found[name] = out / "best"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_head_notes_the_thinking_that_it_was_trained_with(world, heads, name):
    data = json.loads((heads[name] / "config.json").read_text())["training"]["data"]
    assert data["chat_template_kwargs"] == NAMES[name]
    assert data["left_out_fields"] == ({} if name == "on" else {"thinking": data["rows_kept"]})


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_is_lossless_and_says_where_the_settings_differ(world, heads, capfd, name):
    out = world.folder / f"eval_{name}"
    line = ["--checkpoint", str(heads["on"]), "--chat-template-kwargs", json.dumps(NAMES[name])]
    line += ["--benchmarks", str(world.folder / "prompts.jsonl"), "--max-new-tokens", str(NEW)]
    assert status([*line, "--schedule", "eagle", "--tree", "chain:2", "--out", str(out)]) == 0
    said = 'but {} was trained with {{"enable_thinking": true}}'.format(heads["on"])
    assert (said in capfd.readouterr().err) == (name == "off")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["config"]["chat_template_kwargs"] == NAMES[name]
    drafted = [x for x in json.loads((out / "results.json").read_text())["runs"] if x["drafted"]]
    assert [run["lossless"] for run in drafted] == [{"checked": 2, "mismatches": 0}]
    assert {"context/0"} < {x["group"] for x in drafted[0]["acceptance_by_group"]}


def test_a_server_answers_as_the_target_with_thinking_and_without(world, heads):
    tokenizer = AutoTokenizer.from_pretrained(world.target)
    model = load_target(str(world.target), dtype=torch.float32)
    config = DecodeConfig.of("eagle", num_stages=2, tree="chain:2", max_new_tokens=NEW)
    engine = Engine(model, tokenizer, config, load_draft(str(heads["on"]), model))
    messages = [{"role": "user", "content": "What is 7 plus 2?"}]
    lengths = []
    with serving(engine) as place:
        for variables in NAMES.values():
            ids = torch.tensor([encode_chat(tokenizer, messages, variables)])
            written = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
            asked = {"messages": messages, "chat_template_kwargs": variables, "temperature": 0}
            told = place.chat(**asked, max_tokens=NEW)
            expected = tokenizer.decode(written, skip_special_tokens=True)
            answer = told.json["choices"][0]["message"]["content"]
            assert (told.status, answer) == (200, expected)
            lengths.append(told.json["usage"]["prompt_tokens"])
    assert lengths[0] < lengths[1]
