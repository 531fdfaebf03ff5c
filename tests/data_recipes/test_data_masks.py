"""Chat templates: supervised tokens per conversation, and valid conversations."""

from functools import partial

import data_rows
import pytest
from data_rows import CHAT, PLAIN, PROMPT, TURN, templated, tokenize_conversation
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CHAT_TEMPLATE
from tokenizers.processors import TemplateProcessing

from pipedraft.data_recipes.chat import mark_tokens
from pipedraft.data_recipes.conversations import read_conversation

# Cuts thinking from every assistant turn before a later user turn, as Qwen3's template does.
STRIPS_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ " + TURN.format(content="text") + " }}{% endfor %}" + PROMPT
)
# The generation prompt opens a thinking block; finished turns have none.
OPENS_THINKING = (
    PLAIN.removesuffix(PROMPT)
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a duck.<|im_end|>\n' }}{% endif %}" + PLAIN
)
# Llama 2's shape: no header of its own for the assistant, spaces around the content.
INSTRUCT = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'].strip() + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
# Puts an empty thinking block before the last answer, as Qwen3's template does.
EMPTY_THINKING = (
    "{% for m in messages %}{% set empty = '<think>\n\n</think>\n\n' if loop.last and "
    "m['role'] == 'assistant' else '' %}{{ "
    + TURN.format(content="empty + m['content']")
    + " }}{% endfor %}"
    + PROMPT
)
# As OPENS_THINKING, and no finished turn keeps its thinking (DeepSeek R1's way).
NEVER_THINKS = OPENS_THINKING.replace("m['content']", "m['content'].split('</think>')[-1]")
# Harmony's shape: earlier turns lose their thinking and end with another token than the last one.
CHANNELS = (
    "{% macro say(m, end) %}{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + end"
    " }}{% endmacro %}{% for m in messages %}{% if m['role'] != 'assistant' %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}"
    "{% elif loop.last and not add_generation_prompt %}{% if m['thinking'] %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m['thinking'] + '<|end|>' }}"
    "{% endif %}"
    "{{ say(m, '<|return|>') }}{% else %}{{ say(m, '<|end|>') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
CHANNEL_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
NO_CLOSING = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


tokenizer = data_rows.tokenizer
"""Fixture."""


@pytest.fixture
def with_template(tokenizer):
    return partial(templated, tokenizer)


def supervised_runs(tokenizer, messages, max_length=10_000):
    """Return the text in each unbroken run of supervised tokens."""
    ids, mask = tokenize_conversation(tokenizer, messages, max_length)
    assert len(ids) == len(mask) <= max_length
    runs, previous = [], 0
    for token, marked in zip(ids, mask, strict=True):
        if marked and not previous:
            runs.append([])
        if marked:
            runs[-1].append(token)
        previous = marked
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, PLAIN, DEFAULT_SYSTEM, OPENS_THINKING, NEVER_THINKS]
)
def test_the_mask_decodes_to_every_assistant_turn_and_its_closing_token(with_template, template):
    runs = supervised_runs(with_template(template), CHAT)
    assert runs == [turn["content"] + "<|im_end|>" for turn in CHAT[1::2]]


def test_what_the_template_puts_behind_the_prompt_is_the_targets(with_template):
    """An empty thinking block is the target's own text, unless the prompt has it."""
    runs = supervised_runs(with_template(EMPTY_THINKING), CHAT)
    answers = [turn["content"] + "<|im_end|>" for turn in CHAT[1::2]]
    assert runs == [*answers[:-1], "<think>\n\n</think>\n\n" + answers[-1]]
    given = PROMPT.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    switched = EMPTY_THINKING.replace(PROMPT, given)
    assert switched != EMPTY_THINKING
    assert supervised_runs(with_template(switched), CHAT) == answers


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
@pytest.mark.parametrize("thinks", [False, True])
def test_turns_that_differ_in_place_begin_behind_the_prompt(with_template, num_rounds, thinks):
    """As the last turn, a turn ends with <|return|> and has its thinking; in place, it has not."""
    own = with_template(CHANNELS)
    own.add_special_tokens({"extra_special_tokens": list(CHANNEL_MARKS)})
    chat, expected = [], []
    for number in range(num_rounds):
        thought = {"reasoning_content": f"Thought {number}."} if thinks else {}
        chat.append({"role": "user", "content": f"Question {number}?"})
        chat.append({"role": "assistant", "content": f"Answer {number}.", **thought})
        expected.append(f"<|channel|>final<|message|>Answer {number}.<|end|>")
    expected[-1] = expected[-1].replace("<|end|>", "<|return|>")
    if thinks:
        thought = f"<|channel|>analysis<|message|>Thought {num_rounds - 1}.<|end|>"
        expected[-1] = f"{thought}<|start|>assistant{expected[-1]}"
    assert supervised_runs(own, chat) == expected


def test_a_text_with_private_characters_is_masked_too(with_template):
    chat = [
        {"role": "user", "content": "\U000f0001"},
        {"role": "assistant", "content": "\U000ffffd"},
    ]
    assert supervised_runs(with_template(PLAIN), chat) == ["\U000ffffd<|im_end|>"]


def test_templates_with_and_without_generation_marks_give_the_same_mask(with_template):
    marked = tokenize_conversation(with_template(CHAT_TEMPLATE), CHAT, 1000)
    assert marked == tokenize_conversation(with_template(PLAIN), CHAT, 1000)


def test_a_generation_block_without_the_closing_token_is_extended_to_it(with_template):
    inner = "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
    outer = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    template = CHAT_TEMPLATE.replace(outer, inner)
    assert template != CHAT_TEMPLATE
    runs = supervised_runs(with_template(template), CHAT)
    assert runs == [turn["content"] + "<|im_end|>" for turn in CHAT[1::2]]


def test_stripped_thinking_is_absent_and_kept_thinking_is_supervised(with_template):
    thinking = [
        {"role": "user", "content": "two plus two, 4?"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"},
        {"role": "user", "content": "4 again"},
        {"role": "assistant", "content": "<think>\nagain\n</think>\n\n4"},
    ]
    runs = supervised_runs(with_template(STRIPS_THINKING), thinking)
    assert runs == ["4<|im_end|>", "<think>\nagain\n</think>\n\n4<|im_end|>"]
    runs = supervised_runs(with_template(NEVER_THINKS), thinking)
    assert [run.strip() for run in runs] == ["4<|im_end|>", "4<|im_end|>"]


@pytest.mark.parametrize("answer", ["think", "user", "assistant", "im_end", "<think>"])
def test_an_answer_that_looks_like_the_template_is_found_in_its_place(with_template, answer):
    chat = [
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    for template in (CHAT_TEMPLATE, PLAIN, EMPTY_THINKING, OPENS_THINKING):
        runs = supervised_runs(with_template(template), chat)
        empty = "<think>\n\n</think>\n\n" * (template == EMPTY_THINKING)
        # The prompt may have the mark already.
        own = answer if template != OPENS_THINKING else answer.removeprefix("<think>")
        assert runs == [f"{own}<|im_end|>", f"{empty}{own}<|im_end|>"]


def test_an_answer_that_the_user_already_said_is_marked_in_the_assistant_turn(with_template):
    """A search from the previous span would find the user's words: the prefix must be used."""
    chat = [
        {"role": "user", "content": "echo"},
        {"role": "assistant", "content": "echo"},
    ]
    for template in (OPENS_THINKING, STRIPS_THINKING, PLAIN):
        tokenizer = with_template(template)
        ids, mask = tokenize_conversation(tokenizer, chat, 100)
        before = tokenizer.decode(ids[: mask.index(1)])
        assert before.endswith("<|im_start|>assistant\n")


def test_a_rewritten_turn_is_not_looked_for_beyond_the_next_turn(with_template):
    thought = "<think>\nsum\n</think>\n\n4"
    chat = [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": thought},
        {"role": "assistant", "content": "right"},
    ]
    assert supervised_runs(with_template(STRIPS_THINKING), chat) == [
        "4<|im_end|>",
        "right<|im_end|>",
    ]


def test_a_template_with_spaces_around_the_content_closes_the_turn(with_template):
    runs = supervised_runs(with_template(INSTRUCT), CHAT)
    assert [run.strip() for run in runs] == [t["content"] + " <|im_end|>" for t in CHAT[1::2]]


def test_a_template_without_closing_token_marks_the_content_alone(with_template):
    """A token containing the space before the content counts as the assistant's."""
    runs = supervised_runs(with_template(NO_CLOSING), CHAT)
    assert [run.strip() for run in runs] == [turn["content"] for turn in CHAT[1::2]]


def test_the_ids_are_those_of_the_rendered_text_with_one_bos(with_template):
    bos = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    tokenizer = with_template(INSTRUCT)
    tokenizer.backend_tokenizer.post_processor = bos
    assert tokenizer("x")["input_ids"][0] == tokenizer.pad_token_id
    ids, _ = tokenize_conversation(tokenizer, CHAT, 1000)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert ids.count(tokenizer.pad_token_id) == 1


def test_truncation_cuts_ids_and_mask_alike(tokenizer):
    ids, mask = tokenize_conversation(tokenizer, CHAT, 1000)
    for max_length in (1, 20, len(ids) - 1, len(ids)):
        cut = tokenize_conversation(tokenizer, CHAT, max_length)
        assert cut == (ids[:max_length], mask[:max_length])


@settings(max_examples=20, deadline=None)
@given(answers=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=4))
def test_any_answer_round_trips_through_ids_and_mask(tokenizer, answers):
    if any("<|" in answer for answer in answers):
        return
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": "go"}, {"role": "assistant", "content": answer}]
    runs = supervised_runs(tokenizer, messages)
    assert runs == [answer + "<|im_end|>" for answer in answers]


def test_offsets_trimmed_of_whitespace_still_mark_the_whitespace_token():
    """Byte-level post-processors report "a", "<newline>", "b" this way: the middle one is empty."""
    offsets = [(0, 1), (2, 2), (2, 3)]
    assert mark_tokens(offsets, [(0, 3)]) == [1, 1, 1]
    assert mark_tokens(offsets, [(0, 2)]) == [1, 1, 0]
    assert mark_tokens(offsets, [(2, 3)]) == [0, 0, 1]
    assert mark_tokens(offsets, []) == [0, 0, 0]


def test_openai_and_sharegpt_rows_become_the_same_messages():
    expected = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read_conversation({"messages": expected}).messages == expected
    assert read_conversation({"conversations": expected}).messages == expected
    assert read_conversation({"conversations": sharegpt, "id": 3}).messages == expected
    nulls = [turn | {"role": None, "content": None} for turn in sharegpt]
    assert read_conversation({"messages": None, "conversations": nulls}).messages == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "row is not an object"),
        ({"text": "x"}, "no messages"),
        ({"messages": "x"}, "not a list"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": ["x"]}, "turn is not an object"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "empty content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "not a string"),
        ({"messages": [{"role": "parrot", "content": "x"}]}, "unknown role"),
    ],
)
def test_a_bad_row_names_its_reason(row, reason):
    with pytest.raises(ValueError, match=reason):
        read_conversation(row)
