"""Split what a target writes into thinking, content and tool calls, also while it arrives.

The tokenizer's ``response_template`` says how (transformers' ``ResponseParser``). A tokenizer
without one gets a template here if its chat template has gpt-oss's channels (harmony) or <think>
marks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .chats import END_THINK, THINK
from .files import Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Field = Literal["thinking", "content", "tool_calls"]
FIELDS: dict[str, Field] = {
    **dict.fromkeys(("thinking", "reasoning_content", "reasoning"), "thinking"),
    "content": "content",
    "tool_calls": "tool_calls",
}
"""Message field in a response template -> field here."""
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# A call's name comes before or after its channel, with or without <|constrain|>.
TO_FUNCTION = r"\s*to=functions\.(?P<name>[^\s<]+)\s*"
COMMENTARY = r"<\|channel\|>commentary"
TYPED = r"\s*(?:<\|constrain\|>)?\s*json\s*<\|message\|>"
HARMONY: Values = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close": ["<|end|>", "<|return|>", "<|call|>"],
            "repeats": True,
            "join": "\n",
        },
        "content": {
            # Text in the commentary channel without a recipient is for the user.
            "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            "close": ["<|return|>", "<|end|>", "<|call|>"],
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            "open_pattern": f"(?:{TO_FUNCTION}{COMMENTARY}|{COMMENTARY}{TO_FUNCTION}){TYPED}",
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": CALL,
        },
    },
}
THINKS: Values = {
    # The reader gives a prompt's own <think> alone, so there is nothing to skip.
    "start_anchor_pattern": r"\A",
    "fields": {
        "thinking": {"open_pattern": r"\A\s*<think>", "close_pattern": r"</think>\s*"},
        "content": {},
    },
}
CALLS_IN_JSON: Values = {
    "open": "<tool_call>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}

CALLS_IN_TAGS: Values = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    },
    "transform": CALL,
}
CALLS_IN_PAIRS: Values = CALLS_IN_TAGS | {
    "open_pattern": r"<tool_call>(?P<name>[^\s<]+)",
    "content_args": {
        "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    },
}


class Part(NamedTuple):
    """Text that belongs to one field of an answer."""

    field: Field
    text: str


@dataclass
class Response:
    """One answer, split."""

    thinking: str = ""
    content: str = ""
    tool_calls: list[Values] = field(default_factory=list)
    """Calls in OpenAI's form; arguments are an object, or text if they are no JSON object."""

    def message(self) -> Values:
        """Return the assistant's turn, as chat templates and data sets have it."""
        turn: Values = {"role": "assistant", "content": self.content}
        if self.thinking:
            turn["reasoning_content"] = self.thinking
        if self.tool_calls:
            turn["tool_calls"] = self.tool_calls
        return turn


def find_template(tokenizer: "PreTrainedTokenizerBase", prompt: str, calls: bool) -> Values | None:
    """Return the response template for answers to a prompt, or None if answers are plain text.

    Args:
        calls: read tool calls, too, where a chat template of its own kind does not imply them.
    """
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return lenient(deepcopy(own))
    chat = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    if "<|channel|>" in chat and "<|message|>" in chat:
        found = deepcopy(HARMONY)
    elif END_THINK in chat or prompt.rstrip().endswith(THINK):
        found = deepcopy(THINKS)
    elif calls and "<tool_call>" in chat:
        found = {**THINKS, "fields": {"content": {}}}
    else:
        return None
    if calls and "<tool_call>" in chat:
        kinds = {"<function=": CALLS_IN_TAGS, "<arg_key>": CALLS_IN_PAIRS}
        kind = next((form for mark, form in kinds.items() if mark in chat), CALLS_IN_JSON)
        found["fields"] = {**found["fields"], "tool_calls": deepcopy(kind)}
    return lenient(found)


def lenient(template: Values) -> Values:
    """Let a call's arguments be no JSON: a call that was cut must not stop the answer."""
    for part in template.get("fields", {}).values():
        if part.get("content") == "json":
            part["content_args"] = {**part.get("content_args", {}), "allow_non_json": True}
    return template


class ResponseReader:
    """Splits one answer as its text arrives. No text is lost, whatever the target writes."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: Values,
        prompt: str,
        tools: Sequence[Values] | None = None,
    ) -> None:
        """
        Args:
            prompt: the rendered prompt. It may have begun the answer, for example with <think>.
            tools: the conversation's tools, whose schemas give the arguments' types.
        """
        from transformers.utils.chat_parsing import ResponseParser

        if template.get("start_anchor_pattern") == r"\A":
            prompt = THINK if prompt.rstrip().endswith(THINK) else ""
        # Backslashes of a pattern hide its marks.
        plain = json.dumps(template, ensure_ascii=False).replace("\\", "")
        added = tokenizer.added_tokens_decoder.items()
        self.marks = {i: t.content for i, t in added if t.special and t.content in plain}
        """Special tokens of the format: id -> text. They never reach a field."""
        self.response = Response()
        self._is_plain = all(part in ("content", "tool_calls") for part in template["fields"])
        self._unread = re.compile("|".join(map(re.escape, self.marks.values())) or r"(?!)")
        self._parser = ResponseParser(template, prefix=prompt, tools=[*tools] if tools else None)
        self._said: list[str] = []
        self._call = self._space = ""
        """Text of the open tool call; whitespace of the thinking that more text may follow."""
        self._has_failed = False
        self._read(self._parser.initial_events)

    def feed(self, text: str) -> list[Part]:
        """Return the parts that this text completes. The format's marks are given as text, too."""
        self._said.append(text)
        if self._has_failed:
            return self._add("content", text)
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, KeyError, TypeError):
            return self._give_up(text)

    def finish(self) -> list[Part]:
        """Return the parts that end with the answer."""
        parts: list[Part] = []
        if not self._has_failed:
            try:
                parts = self._read(self._parser.finalize()[1])
            except (ValueError, KeyError, TypeError):
                parts = self._give_up("")
        answer = self.response
        if not (answer.content or answer.thinking or answer.tool_calls):
            # Text outside of all channels: better shown than lost.
            parts += self._add("content", "".join(self._said).strip())
        return parts

    def _give_up(self, text: str) -> list[Part]:
        """Take the rest as content, after a tool call that the parser cannot read."""
        self._has_failed = True
        text, self._call = self._call + text, ""
        return self._add("content", text)

    def _read(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            name, kind = FIELDS.get(event["field"]), event["type"]
            if name is None:
                continue
            if name == "tool_calls":
                parts += self._read_call(event)
            elif kind == "region_chunk":
                parts += self._add(name, event["text"])
            elif kind == "region_open" and name == "thinking":
                # A second block of thinking begins on a line of its own.
                self._space = "\n" if self.response.thinking else ""
        return parts

    def _read_call(self, event: Mapping[str, Any]) -> list[Part]:
        if event["type"] == "region_chunk":
            self._call += event["text"]
        if event["type"] != "region_close":
            return []
        call, text, self._call = event["value"], self._call, ""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return self._add("content", text)
        found = {"name": function["name"], "arguments": function.get("arguments") or {}}
        self.response.tool_calls.append({"type": "function", "function": found})
        return [Part("tool_calls", "")]

    def _add(self, name: Field, text: str) -> list[Part]:
        text = self._unread.sub("", text)
        answer = self.response
        if name == "thinking":
            # Whitespace around the thinking is the template's.
            text = self._space + text if answer.thinking else text.lstrip()
            kept = text.rstrip()
            self._space, text = text[len(kept) :], kept
            answer.thinking += text
        else:
            if not answer.content and not self._is_plain:
                text = text.lstrip() if answer.thinking or self.marks else text
            answer.content += text
        return [Part(name, text)] if text else []


def format_marks(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Return the special tokens that raw text keeps: id -> text.

    Without them, gpt-oss's thinking and answer would run into each other. The end token adds none.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return {}
    reader = reader_for(tokenizer, "")
    found = {} if reader is None else reader.marks
    return {i: mark for i, mark in found.items() if i != tokenizer.eos_token_id}


def reader_for(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Sequence[int],
    *,
    tools: Sequence[Values] | None = None,
) -> ResponseReader | None:
    """Return a reader for the answer to a prompt, or None if answers are plain text.

    Raises:
        ValueError: the tokenizer's response template is invalid.
    """
    text = prompt if isinstance(prompt, str) else str(tokenizer.decode([*prompt]))
    template = find_template(tokenizer, text, bool(tools))
    if template is None:
        return None
    try:
        return ResponseReader(tokenizer, template, text, tools)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"response_template in tokenizer_config.json: {error}") from error


def marked_text(
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], marks: Mapping[int, str]
) -> str:
    """Decode tokens without special tokens, except for the format's marks."""
    if not marks:
        return str(tokenizer.decode([*ids], skip_special_tokens=True))
    parts, run = [], list[int]()
    for token in ids:
        if token not in marks:
            run.append(token)
            continue
        parts += [str(tokenizer.decode(run, skip_special_tokens=True)), marks[token]]
        run = []
    return "".join([*parts, str(tokenizer.decode(run, skip_special_tokens=True))])


def read_response(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Sequence[int],
    ids: Sequence[int],
    *,
    tools: Sequence[Values] | None = None,
) -> Response:
    """Split a whole answer's tokens."""
    reader = reader_for(tokenizer, prompt, tools=tools)
    if reader is None:
        return Response(content=str(tokenizer.decode([*ids], skip_special_tokens=True)))
    reader.feed(marked_text(tokenizer, ids, reader.marks))
    reader.finish()
    return reader.response
