"""Rows as found in real data: no part vanishes without a message."""

import json

import data_rows
import pytest
from data_rows import PLAIN, PROMPT, templated, write

from pipedraft.chats import render_chat
from pipedraft.data_recipes.answers import Dialogue, RowFailed
from pipedraft.data_recipes.chat import ChatRenderer
from pipedraft.data_recipes.conversations import explode, read_conversation, read_row

tokenizer, load = data_rows.tokenizer, data_rows.load
"""Fixtures."""

USER = {"role": "user", "content": "Say ok."}
OK = {"role": "assistant", "content": "ok"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
CALLS = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, OK]
WITH_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function']['name'] + "
    "(ARGUMENTS) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['reasoning_content'] %}"
    "{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
# As in DeepSeek-R1's distilled models: opened in the prompt, stripped from every turn.
NEVER_KEEPS = PLAIN.removesuffix(PROMPT).replace(
    "m['content']", "m['content'].split('</think>')[-1].strip()"
) + PROMPT.replace("assistant\n", "assistant\n<think>\n")


def rendered(tokenizer, row, template=PLAIN, **settings):
    """Return (text, supervised texts, parts missing from the text) for a row."""
    chat = ChatRenderer(templated(tokenizer, template), **settings).render(read_conversation(row))
    return chat.text, [chat.text[a:b] for a, b in chat.spans], chat.not_rendered


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_prompt_in_a_field_is_the_first_turn(tokenizer, name):
    turn = {"role": "system", "content": "Be a pirate."}
    as_turn = rendered(tokenizer, {"messages": [turn, USER, OK]})
    assert rendered(tokenizer, {name: "Be a pirate.", "messages": [USER, OK]}) == as_turn
    assert rendered(tokenizer, {name: turn["content"], "messages": [turn, USER, OK]}) == as_turn
    with pytest.raises(ValueError, match="another system turn"):
        read_row({name: "Be a duck.", "messages": [turn, USER, OK]})


def test_a_tool_may_return_nothing_and_calls_may_be_text():
    call = {"name": "f", "arguments": {}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": json.dumps([call])},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": "a"},
    ]
    messages = read_row({"messages": turns}).messages
    assert [turn["content"] for turn in messages] == ["q", "", "", "a"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    with pytest.raises(ValueError, match="empty content"):
        read_row({"messages": [turns[0], turns[1] | {"tool_calls": [], "reasoning": "so"}]})


def test_parts_of_text_are_the_text_and_others_are_named():
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "ok."}]
    row = {"messages": [{"role": "user", "content": parts}, OK]}
    assert read_conversation(row).messages == [USER, OK]
    for part, reason in (
        ({"type": "image_url", "image_url": {}}, "type image_url"),
        ({"type": "text", "text": None}, "no text"),
        (7, "no text"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_conversation({"messages": [{"role": "user", "content": [part]}, OK]})
    with pytest.raises(ValueError, match="empty content"):
        read_conversation({"messages": [{"role": "user", "content": []}, OK]})
    with pytest.raises(ValueError, match="images: no text"):
        read_conversation({"messages": [USER, OK], "images": ["a.png"]})


@pytest.mark.parametrize("arguments", ["c['function']['arguments']", "c.function.arguments|tojson"])
def test_calls_and_answers_are_supervised_and_results_are_not(tokenizer, arguments):
    template = WITH_CALLS.replace("ARGUMENTS", arguments)
    text, runs, missing = rendered(tokenizer, {"messages": CALLS}, template)
    assert runs == ["<tool_call>weather{}</tool_call><|im_end|>", "ok<|im_end|>"]
    assert "sunny" in text and missing == ()
    *_, missing = rendered(tokenizer, {"messages": CALLS, "tools": [{"name": "tide"}]})
    assert missing == ("tools", "tool_calls")


def test_sharegpt_calls_and_results_are_those_of_openai():
    call = json.dumps({"name": "weather", "arguments": {}})
    said = {"human": "Say ok.", "function_call": call, "observation": "sunny", "gpt": "ok"}
    row = {"conversations": [{"from": who, "value": text} for who, text in said.items()]}
    roles = [turn["role"] for turn in read_conversation(row).messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert read_conversation(row).messages[1]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_in_a_field_is_supervised_where_the_template_shows_it(tokenizer, name):
    inside = {"role": "assistant", "content": "<think>\nadd\n</think>\n\nok"}
    expected = rendered(tokenizer, {"messages": [USER, inside]}, THINKS)
    assert rendered(tokenizer, {"messages": [USER, OK | {name: "add"}]}, THINKS) == expected
    _, runs, missing = rendered(tokenizer, {"messages": [USER, OK | {name: "add"}]})
    assert runs == ["ok<|im_end|>"] and missing == ("thinking",)


def test_thinking_that_the_template_strips_from_the_last_turn_is_put_back(tokenizer):
    row = {"messages": [USER, OK, USER, OK | {"reasoning_content": "add"}]}
    text, runs, _ = rendered(tokenizer, row, NEVER_KEEPS, keeps_thinking=True)
    assert text.endswith("assistant\n<think>\nadd\n</think>\n\nok<|im_end|>")
    assert runs == ["ok<|im_end|>", "add\n</think>\n\nok<|im_end|>"]


@pytest.mark.parametrize("switch", [{"weight": 0}, {"train": False}])
def test_a_turn_of_weight_0_is_read_and_not_learned(tokenizer, switch):
    row = {"messages": [USER, OK | switch, USER, OK]}
    text, runs, _ = rendered(tokenizer, row)
    assert runs == ["ok<|im_end|>"] and text.count("ok<|im_end|>") == 2
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        read_conversation({"messages": [USER, OK | {"weight": 0.5}]})


def test_template_variables_are_the_recipes_or_the_rows_own(tokenizer):
    template = PLAIN + "{{ 'mood ' + (mood | default('none')) }}"
    row = {"messages": [USER, OK]}
    own = row | {"chat_template_kwargs": {"mood": "glad", "unset": None}}
    ends = [
        rendered(tokenizer, one, template, variables=given)[0].rpartition("mood ")[2]
        for one in (row, own)
        for given in ({}, {"mood": "grim"})
    ]
    assert ends == ["none", "grim", "glad", "glad"]
    with pytest.raises(ValueError, match="'tokenize' is no variable"):
        rendered(tokenizer, row, template, variables={"tokenize": False})


def test_the_report_counts_what_the_text_does_not_show(tokenizer, load, tmp_path):
    rows = [{"messages": [USER, OK | {"mood": "glad"}], "rating": 5}] * 2
    rows.append({"messages": [USER, OK | {"reasoning": "hm"}]})
    report = load(write(tmp_path / "rows.jsonl", rows), valid_fraction=0).report
    assert report.left_out_fields == {"rating": 2, "turn.mood": 2, "thinking": 1}
    assert "not in the text: turn.mood, of 2 rows" in report.summary()


def test_exploded_rows_learn_one_turn_each(tokenizer, load, tmp_path):
    row = {"messages": [USER, OK, USER, OK | {"content": "ok ok"}]}
    assert [len(x["messages"]) for x in explode(row)] == [2, 4]
    assert explode({"messages": "x"}) == [{"messages": "x"}]
    data = load(write(tmp_path / "rows.jsonl", [row]), valid_fraction=0, explode_turns=True)
    runs = [
        tokenizer.decode([t for t, m in zip(r["input_ids"], r["loss_mask"], strict=True) if m])
        for r in data.train
    ]
    assert runs == ["ok<|im_end|>", "ok ok<|im_end|>"]


def test_a_dialogue_asks_with_all_that_the_row_has(tokenizer):
    row = {"system": "Be brief.", "tools": [{"name": "weather"}], "messages": CALLS, "id": 1}
    dialogue = Dialogue.read(0, json.dumps(row))
    roles = [turn["role"] for turn in dialogue.question()]
    assert roles == ["system", "user", "assistant", "tool"] and len(dialogue.prompts) == 1
    assert dialogue.tools == row["tools"] and "system" not in dialogue.fields
    assert "weather" in render_chat(
        templated(tokenizer, WITH_CALLS.replace("ARGUMENTS", "''")), dialogue.question()
    )
    dialogue.history = dialogue.question()
    assert dialogue.to_row(is_greedy=True)["messages"][2]["weight"] == 0
    for empty in (None, "", []):
        asked = {"messages": [USER, {"role": "assistant", "content": empty}]}
        assert Dialogue.read(0, json.dumps(asked)).question() == [USER]
    with pytest.raises(RowFailed, match="no turns"):
        Dialogue.read(0, json.dumps({"messages": []}))


def test_alpaca_rows_are_conversations():
    """Their input follows the instruction. Without an output, the target's answer is asked for."""
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "source": "x"}
    turns = [("user", "Add.\n\n1 and 2"), ("assistant", "3")]
    found = read_conversation(row)
    assert [(turn["role"], turn["content"]) for turn in found.messages] == turns
    assert found.left_out == ()
    assert read_row({**row, "input": " "}).messages[0]["content"] == "Add."
    assert read_row({**row, "messages": [USER, OK]}).messages[0]["content"] == USER["content"]
    dialogue = Dialogue.read(0, json.dumps({**row, "output": ""}))
    assert dialogue.prompts == [[{"role": "user", "content": turns[0][1]}]]
    assert "output" not in dialogue.fields and dialogue.fields["source"] == "x"
    with pytest.raises(ValueError, match="no assistant turn"):
        read_conversation({"instruction": "Add."})
    with pytest.raises(ValueError, match="no messages or conversations field"):
        read_row({"instruction": "Add.", "output": 3})
