"""Templates of all shapes: masks hold what the target writes, and answers render again.

`docs/lab/templates.py` does the same with TRL's templates.
"""

from copy import deepcopy
from dataclasses import replace

import data_rows
import pytest
from template_runs import TEMPLATES, TOOL, Property, conversations, with_marks

from pipedraft.responses import HARMONY, read_response, reader_for

tokenizer = data_rows.tokenizer
"""Fixture."""


def checked(tokenizer, name, count=5, kind=Property):
    """Return the property of a template, after ``count`` conversations."""
    template = TEMPLATES[name]
    tools = [TOOL] if "tool_calls" in template else None
    found = kind(with_marks(deepcopy(tokenizer), template), tools)
    for messages in conversations(count, thinks=True, tools=tools is not None):
        found.check(messages)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_hold_what_the_target_writes_and_answers_render_again(tokenizer, name):
    found = checked(tokenizer, name)
    assert not found.faults, found.faults[0]
    assert found.counts["turns"] > 10 and found.counts["texts of others"] > 10
    assert found.counts["answers"] > 2 and not found.counts["turns that are not rendered"]


@pytest.mark.all
@pytest.mark.parametrize("name", TEMPLATES)
def test_200_conversations_have_no_fault(tokenizer, name):
    found = checked(tokenizer, name, 200)
    print(name, dict(found.counts))
    assert not found.faults, found.faults[0]


class Shifted(Property):
    def mask(self, messages):
        text, tokens = super().mask(messages)
        losses = [0, *(loss for *_, loss in tokens[:-1])]
        return text, [(a, b, loss) for (a, b, _), loss in zip(tokens, losses, strict=True)]


class WithoutClosing(Property):
    def mask(self, messages):
        text, tokens = super().mask(messages)
        ends = ("<|end|>", "<|return|>", "<|im_end|>")
        return text, [(a, b, loss * (text[a:b] not in ends)) for a, b, loss in tokens]


class OneRun(Property):
    def mask(self, messages):
        text, tokens = super().mask(messages)
        places = [i for i, (*_, loss) in enumerate(tokens) if loss]
        return text, [
            (a, b, int(places[0] <= i <= places[-1])) for i, (a, b, _) in enumerate(tokens)
        ]


class Glued(Property):
    def __post_init__(self):
        super().__post_init__()
        store = self.store

        def glue(*given, **options):
            answer = store(*given, **options)
            return replace(answer, thinking="", content=answer.thinking + answer.content)

        self.store = glue


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Shifted, "the target's token is not supervised"),
        (WithoutClosing, "the target's token is not supervised"),
        (OneRun, "another's token is supervised"),
        (Glued, "thinking in the content"),
    ],
)
@pytest.mark.parametrize("name", ["channels", "last thinking"])
def test_the_property_finds_planted_faults(tokenizer, name, kind, said):
    assert any(fault.startswith(said) for fault in checked(tokenizer, name, 3, kind).faults)


PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}}


@pytest.mark.parametrize(
    ("written", "thinking", "content", "calls"),
    [
        (ANALYSIS.format("hm\n") + "<|channel|>final<|message|>yes<|return|>", "hm", "yes", []),
        (ANALYSIS.format("a") + ANALYSIS.format("b"), "a\nb", "", []),
        ("<|channel|>final<|message|>one<|channel|>two", "", "onetwo", []),
        ("<|channel|>analysis<|message|>cut", "cut", "", []),
        ("no channel at all", "", "no channel at all", []),
        (
            ANALYSIS.format("hm")
            + ' to=functions.look_up<|channel|>commentary json<|message|>{"word"'
            ': "a"}<|call|>',
            "hm",
            "",
            [CALL],
        ),
        (
            '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "a"}',
            "",
            "",
            [CALL],
        ),
    ],
)
def test_an_answer_in_channels_is_split_whole_and_token_by_token(
    tokenizer, written, thinking, content, calls
):
    own = with_marks(deepcopy(tokenizer), TEMPLATES["channels"])
    ids, prompt = (own(x, add_special_tokens=False).input_ids for x in (written, PROMPT))
    found = read_response(own, prompt, ids)
    assert (found.thinking, found.content, found.tool_calls) == (thinking, content, calls)
    reader = reader_for(own, prompt)
    parts = [p for x in ids for p in reader.feed(reader.marks.get(x) or own.decode([x]))]
    parts += reader.finish()
    for name, text in (("thinking", thinking), ("content", content)):
        assert "".join(part.text for part in parts if part.field == name) == text
    assert not any("<|" in part.text for part in parts)


def test_a_tokenizers_own_response_template_comes_first(tokenizer):
    own = with_marks(deepcopy(tokenizer), TEMPLATES["last thinking"])
    ids = own("<|channel|>final<|message|>yes", add_special_tokens=False).input_ids
    assert read_response(own, PROMPT, ids).content != "yes"
    own.response_template = HARMONY
    assert read_response(own, PROMPT, ids).content == "yes"
    own.response_template = {"fields": {}}
    with pytest.raises(ValueError, match="response_template in tokenizer_config.json"):
        reader_for(own, PROMPT)


@pytest.mark.parametrize(
    ("prompt", "written", "thinking", "content"),
    [
        ("<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", " yes", "", " yes"),
        ("<|im_start|>assistant\n", "write <think>x</think>", "", "write <think>x</think>"),
        ("<|im_start|>assistant\n", "<think>cut", "cut", ""),
    ],
)
def test_think_marks_split_an_answer_at_its_beginning_only(
    tokenizer, prompt, written, thinking, content
):
    own = with_marks(deepcopy(tokenizer), TEMPLATES["last thinking"])
    found = read_response(own, prompt, own(written, add_special_tokens=False).input_ids)
    assert (found.thinking, found.content) == (thinking, content)
