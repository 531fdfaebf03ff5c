"""Turn conversations into token ids and assistant loss masks, for any chat template.

Masks are made from character spans in the rendered text. The text is tokenized once with offsets,
never in pieces, because BPE merges across the seams.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..chats import ChatRefused, check_template_variables, render_chat, render_turns
from ..files import Values
from .conversations import (
    REASONING,
    Conversation,
    Message,
    inline_thinking,
    thinking_of,
)

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "pipedraftprobe"
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class RenderedChat:
    """One conversation as the target reads it, with the spans that the assistant wrote."""

    text: str
    spans: list[tuple[int, int]]
    """Character ranges [start, end) written by the assistant, the end-of-turn token included."""
    num_missing: int
    """Assistant turns without any trace in the text."""
    not_rendered: tuple[str, ...] = ()
    """Conversation fields left out by the template."""
    has_thinking_back: bool = False
    """True if the last turn's thinking was put back after the template stripped it."""


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template and finds the assistant's spans.

    A template with ``{% generation %}`` marks shows where the assistant's text is. Without marks,
    turn i starts where render(messages[:i], add_generation_prompt=True) ends, if the whole text
    begins with this prefix. Some templates rewrite turns, for example strip thinking. Then the
    turn's content is searched for after the prefix. Spans exclude text that the template adds
    around the content, except tool calls and the special token that closes the turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        variables: Mapping[str, object] | None = None,
        *,
        keeps_thinking: bool = False,
    ) -> None:
        """
        Args:
            variables: chat template variables (``chat_template_kwargs``).
            keeps_thinking: put the last turn's thinking back if the template strips the thinking.
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer: {tokenizer.name_or_path!r} has no offsets; use its fast version"
            )
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer: {tokenizer.name_or_path!r} has no chat template; set "
                "tokenizer.chat_template or name the instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})
        self.keeps_thinking = keeps_thinking
        self.template = tokenizer.get_chat_template()
        self.marks_generation = bool(GENERATION_MARK.search(self.template))
        self.thinking_names = [name for name in REASONING if name in self.template]

    @cached_property
    def closing(self) -> str:
        """Return an assistant turn's closing special token with the whitespace before it, or ""."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
        tail = render_chat(
            self.tokenizer, messages, prompt=False, variables=self.variables
        ).rpartition(PROBE)[2]
        added = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        special = "|".join(re.escape(token) for token in added)
        match = re.match(rf"\s*(?:{special})", tail) if special else None
        return match.group() if match else ""

    def render(self, chat: Conversation | list[Message]) -> RenderedChat:
        """Render a chat and find the assistant's turns. Raise ValueError if the chat is refused."""
        given = chat if isinstance(chat, Conversation) else Conversation(chat)
        given = replace(given, variables={**self.variables, **given.variables})
        check_template_variables(given.variables, "chat_template_kwargs")
        messages = [self.as_read(message) for message in given.messages]
        text = "" if self.marks_generation else None
        finder = TurnFinder(self, replace(given, messages=messages), text)
        found = finder.find_marked() if self.marks_generation else finder.find()
        if self.keeps_thinking and not self.marks_generation:
            found = self._put_back(found, given.messages[-1], finder)
        return replace(found, not_rendered=unrendered(given, found.text))

    def as_read(self, message: Message) -> Message:
        """Return the message with thinking where the template reads it (a field or the content)."""
        if "reasoning_content" not in message:
            return message
        if self.thinking_names:
            thought = message["reasoning_content"]
            return message | dict.fromkeys(self.thinking_names, thought)
        return inline_thinking(message) if END_THINK in self.template else message

    def _put_back(self, found: RenderedChat, last: Message, finder: "TurnFinder") -> RenderedChat:
        """Put the last turn's thinking back into the chat, as the target generates it.

        DeepSeek-R1's distilled models open the thinking in the prompt for an answer. Their template
        strips the thinking from all answers in a conversation.
        """
        thought, answer = thinking_of(last)
        if last["role"] != "assistant" or not thought or thought in found.text:
            return found
        prompt = finder.prefix(len(finder.messages) - 1, prompt=True)
        if prompt is None or last.get("tool_calls"):
            return found
        opens = prompt.rstrip().endswith(THINK)
        is_off = prompt.rstrip().endswith(END_THINK)  # enable_thinking: false
        if is_off or (not opens and END_THINK not in self.template):
            return found
        head = ("" if prompt.endswith("\n") else "\n") if opens else f"{THINK}\n"
        own = f"{head}{thought}\n{END_THINK}\n\n{answer.strip()}{self.closing}"
        earlier = TurnFinder(self, replace(finder.chat, messages=finder.messages[:-1]), prompt)
        before = earlier.find()
        spans = [*before.spans]
        if last.get("train", True):
            spans.append((len(prompt), len(prompt) + len(own)))
        return RenderedChat(prompt + own, spans, before.num_missing, has_thinking_back=True)

    def tokenize(self, chats: list[RenderedChat]) -> list[tuple[list[int], list[int]]]:
        """Tokenize all chats in one call. Return each chat's token ids and loss mask, uncut.

        ``add_special_tokens`` is off, because a template writes its own BOS.
        """
        encoding = self.tokenizer(
            [chat.text for chat in chats],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        pairs = zip(chats, encoding["input_ids"], encoding["offset_mapping"], strict=True)
        return [(ids, mark_tokens(offsets, chat.spans)) for chat, ids, offsets in pairs]


class TurnFinder:
    """Finds the assistant turns in one rendered conversation."""

    def __init__(self, renderer: ChatRenderer, chat: Conversation, text: str | None = None) -> None:
        self.renderer, self.chat, self.messages = renderer, chat, chat.messages
        self.closing = renderer.closing
        self.text = self.render(self.messages) if text is None else text

    def render(self, messages: list[Message], *, prompt: bool = False) -> str:
        return render_chat(
            self.renderer.tokenizer,
            messages,
            prompt=prompt,
            tools=self.chat.tools,
            variables=self.chat.variables,
        )

    def find(self) -> RenderedChat:
        """Find assistant turns by prefixes and contents if the template has no generation marks."""
        spans, num_missing, cursor = [], 0, 0
        for index, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            span = None
            if message.get("tool_calls") or "reasoning_content" in message:
                span = self._find_whole(index, cursor)
            if span is None and (message["content"] or not message.get("tool_calls")):
                span = self._find_turn(index, cursor)
            if span is None:
                num_missing += 1
                continue
            cursor = span[1]
            if message.get("train", True):
                spans.append(span)
        return RenderedChat(self.text, spans, num_missing)

    def find_marked(self) -> RenderedChat:
        """Find the assistant's turns by the template's generation marks."""
        variables: Values = dict(self.renderer.tokenizer.special_tokens_map) | self.chat.variables

        def render(turns: list[Values]) -> str:
            # Annotated as str, returns (texts, generation marks of each text).
            rendered: Any = render_jinja_template(
                [turns],
                tools=self.chat.tools,  # type: ignore[arg-type]
                chat_template=self.renderer.template,
                return_assistant_tokens_mask=True,
                **variables,
            )
            marks[:] = rendered[1][0]
            return rendered[0][0]

        marks: list[tuple[int, int]] = []
        text, spans = render_turns(self.messages, render), []
        for start, end in marks:
            trimmed = start + len(text[start:end].rstrip())
            if self.closing and text.endswith(self.closing, start, trimmed):
                end = trimmed
            elif self.closing and text.startswith(self.closing, end):
                end += len(self.closing)
            if end > start:
                spans.append((start, end))
        turns = [message for message in self.messages if message["role"] == "assistant"]
        num_missing = max(0, len(turns) - len(spans))
        if not all(turn.get("train", True) for turn in turns):
            if len(spans) != len(turns):
                raise ValueError("weights of turns that the template does not mark one by one")
            pairs = zip(spans, turns, strict=True)
            spans = [span for span, turn in pairs if turn.get("train", True)]
        return RenderedChat(text, spans, num_missing)

    def prefix(self, num_turns: int, *, prompt: bool) -> str | None:
        """Render only the first turns. Return None for no turns, or if the template refuses."""
        if not num_turns:
            return None
        try:
            return self.render(self.messages[:num_turns], prompt=prompt)
        except ChatRefused:
            return None

    def _prefix_length(self, num_turns: int, *, prompt: bool) -> int | None:
        """Return the rendered length of the first turns, or None if the text begins otherwise."""
        prefix = self.prefix(num_turns, prompt=prompt)
        return len(prefix) if prefix is not None and self.text.startswith(prefix) else None

    def _find_whole(self, index: int, cursor: int) -> tuple[int, int] | None:
        """Return the span of all of turn ``index`` (thinking, content and tool calls), or None."""
        prompt = self.prefix(index, prompt=True)
        start = None
        for candidate in () if prompt is None else (prompt, opened(prompt)):
            if start is None and self.text.startswith(candidate):
                start = len(candidate)
        if start is None and prompt is not None:
            bare = self.prefix(index, prompt=False) or ""
            header = opened(prompt.removeprefix(bare)) if prompt.startswith(bare) else ""
            at = self.text.find(header, cursor) if header.strip() else -1
            start = at + len(header) if at >= 0 else None
        if start is None:
            return None
        ceiling = self._prefix_length(index + 1, prompt=False)
        if ceiling is None or ceiling < start:
            ceiling = len(self.text)
            place = self.text.find(self.closing, start) if self.closing else -1
        else:
            place = self.text.rfind(self.closing, start, ceiling) if self.closing else -1
        if place >= 0:
            return start, place + len(self.closing)
        end = start + len(self.text[start:ceiling].rstrip())
        return (start, end) if end > start else None

    def _find_turn(self, index: int, cursor: int) -> tuple[int, int] | None:
        """Return assistant turn ``index``'s span at or after ``cursor``, or None if not found."""
        text, content = self.text, self.messages[index]["content"]
        answer = content.rpartition(END_THINK)[2].strip()
        start = self._prefix_length(index, prompt=True)
        if start is not None:
            for candidate in (content, content.strip()):
                at = start + (text.startswith(" ", start) and not candidate.startswith(" "))
                if text.startswith(candidate + self.closing, at):
                    return at, at + len(candidate + self.closing)
        floor = start
        if floor is None:
            floor = self._prefix_length(index, prompt=False) or cursor
        ceiling = self._next_turn(index)
        # With its closing token first: a short answer may also occur in what the template adds.
        for tail in dict.fromkeys((self.closing, "")):
            for candidate in (content, content.strip()):
                at = text.find(candidate + tail, floor, ceiling)
                if at >= 0:
                    return at, at + len(candidate + tail)
        # The template rewrote this turn. All text between prompt and closing token belongs to it.
        if start is not None and self.closing:
            end = text.find(self.closing, start, ceiling)
            region = text[start : max(start, end)]
            if region.strip():
                return start + len(region) - len(region.lstrip()), end + len(self.closing)
        at = text.find(answer, floor, ceiling) if answer else -1
        if at < 0:
            return None
        end = at + len(answer)
        return at, end + len(self.closing) * text.startswith(self.closing, end)

    def _next_turn(self, index: int) -> int:
        """Return the start of the next turn's content, an upper bound for this turn's end."""
        if index + 1 == len(self.messages):
            return len(self.text)
        length = self._prefix_length(index + 2, prompt=False)
        if length is None:
            return len(self.text)
        at = self.text.rfind(self.messages[index + 1]["content"].strip(), 0, length)
        return at if at >= 0 else length


def opened(prompt: str) -> str:
    """Strip the <think> mark at the end of a prompt, if there is one."""
    bare = prompt.rstrip()
    return bare.removesuffix(THINK) if bare.endswith(THINK) else prompt


def unrendered(chat: Conversation, text: str) -> tuple[str, ...]:
    """Return the names of the conversation's fields that are missing in the rendered text."""
    found: dict[str, None] = {}
    for tool in chat.tools or ():
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not is_in(str(name), text):
            found["tools"] = None
    for message in chat.messages:
        role = message["role"]
        if role != "assistant" and not is_in(message["content"], text):
            found[f"turns of role {role}"] = None
        if not is_in(thinking_of(message)[0] if role == "assistant" else "", text):
            found["thinking"] = None
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if not all(is_in(name, text) for name in calls):
            found["tool_calls"] = None
        if not is_in(message.get("name", ""), text):
            found["turn.name"] = None
    return tuple(found)


def is_in(part: str, text: str) -> bool:
    """Return True if a text contains a part, verbatim or as JSON writes it."""
    part = part.strip()
    return part in text or any(
        json.dumps(part, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True)
    )


def mark_tokens(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """Return 1 for every token sharing a character with a span, else 0.

    Byte-level post-processors may trim whitespace from offsets, down to an empty range. So a token
    is taken to begin no later than the end of the token before.
    """
    if not offsets:
        return []
    begin, end = np.asarray(offsets, dtype=np.int64).T
    begin = np.minimum(begin, np.concatenate(([0], end[:-1])))
    mask = np.zeros(len(end), dtype=np.int8)
    for span_begin, span_end in spans:
        mask |= ((end > span_begin) & (begin < span_end)).astype(np.int8)
    return mask.tolist()
