"""Conversations to token ids and assistant loss masks, for any chat template.

A mask is made from character spans of the rendered text, which is tokenized once with offsets; no
piece of a conversation is ever tokenized on its own, because BPE merges across the seams.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from pipedraft.data_recipes.conversations import Message
from pipedraft.files import Values
from pipedraft.pretrained import ChatRefused, render_chat, rendering

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "pipedraftprobe"


@dataclass(frozen=True)
class RenderedChat:
    """One conversation as the target reads it, and who wrote which characters."""

    text: str
    spans: list[tuple[int, int]]
    """Character ranges [start, end) written by the assistant, the end-of-turn token included."""
    num_missing: int
    """Assistant turns of which no trace was found in the text."""


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template and finds the assistant's spans.

    With ``{% generation %}`` marks the template says what the assistant writes. Without them, turn
    i starts where render(messages[:i], add_generation_prompt=True) ends, if the whole text begins
    like that; a template that rewrites turns (strips thinking, adds an empty thinking block) is
    searched for the content after that point. Text that the template adds around the content is
    not part of a span, except the special token that closes the turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
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
        self.template = tokenizer.get_chat_template()
        self.marks_generation = bool(GENERATION_MARK.search(self.template))

    @cached_property
    def closing(self) -> str:
        """The special token after an assistant turn, with the whitespace before it; "" if none."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
        tail = self._render(messages).rpartition(PROBE)[2]
        added = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        special = "|".join(re.escape(token) for token in added)
        match = re.match(rf"\s*(?:{special})", tail) if special else None
        return match.group() if match else ""

    def describe(self) -> str:
        """The template in a few words, for error messages."""
        kind = "with" if self.marks_generation else "without"
        begin = " ".join(self.template.split())[:60]
        return (
            f"chat template of {self.tokenizer.name_or_path!r} ({kind} generation marks, "
            f"begins {begin!r})"
        )

    def render(self, messages: list[Message]) -> RenderedChat:
        """Render all turns once and locate every assistant turn.

        Raises:
            ValueError: the template refuses the conversation (order of roles, no system role ...).
        """
        if self.marks_generation:
            return self._render_marked(messages)
        return self._render_unmarked(messages)

    def _render_unmarked(self, messages: list[Message]) -> RenderedChat:
        text = self._render(messages)
        spans, num_missing, cursor = [], 0, 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            span = self._find_turn(text, messages, index, cursor)
            if span is None:
                num_missing += 1
                continue
            cursor = span[1]
            spans.append(span)
        return RenderedChat(text, spans, num_missing)

    def _render(self, messages: list[Message], *, prompt: bool = False) -> str:
        return render_chat(self.tokenizer, messages, prompt=prompt)

    def _render_marked(self, messages: list[Message]) -> RenderedChat:
        variables: Values = dict(self.tokenizer.special_tokens_map)
        # Annotated as str, returns (texts, generation marks of each text).
        with rendering():
            rendered: Any = render_jinja_template(
                [messages],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **variables,
            )
        texts, marks = rendered
        text, spans = texts[0], []
        for start, end in marks[0]:
            trimmed = start + len(text[start:end].rstrip())
            if self.closing and text.endswith(self.closing, start, trimmed):
                end = trimmed
            elif self.closing and text.startswith(self.closing, end):
                end += len(self.closing)
            if end > start:
                spans.append((start, end))
        num_turns = sum(message["role"] == "assistant" for message in messages)
        return RenderedChat(text, spans, max(0, num_turns - len(spans)))

    def _prefix_length(self, text: str, messages: list[Message], prompt: bool) -> int | None:
        """Length of the rendered messages if the text begins with them, else None."""
        if not messages:
            return None
        try:
            prefix = self._render(messages, prompt=prompt)
        except ChatRefused:
            return None
        return len(prefix) if text.startswith(prefix) else None

    def _find_turn(
        self, text: str, messages: list[Message], index: int, cursor: int
    ) -> tuple[int, int] | None:
        """Span of assistant turn ``index``, at or after ``cursor``; None if it left no trace."""
        content = messages[index]["content"]
        answer = content.rpartition("</think>")[2].strip()
        start = self._prefix_length(text, messages[:index], prompt=True)
        if start is not None:
            for candidate in (content, content.strip()):
                at = start + (text.startswith(" ", start) and not candidate.startswith(" "))
                if text.startswith(candidate + self.closing, at):
                    return at, at + len(candidate + self.closing)
        floor = start
        if floor is None:
            floor = self._prefix_length(text, messages[:index], prompt=False) or cursor
        ceiling = self._next_turn(text, messages, index)
        # With its closing token first: a short answer may also occur in what the template adds.
        for tail in dict.fromkeys((self.closing, "")):
            for candidate in (content, content.strip()):
                at = text.find(candidate + tail, floor, ceiling)
                if at >= 0:
                    return at, at + len(candidate + tail)
        # The template rewrote this turn. Between the prompt and the closing token all is its own.
        if start is not None and self.closing:
            end = text.find(self.closing, start, ceiling)
            region = text[start : max(start, end)]
            if region.strip():
                return start + len(region) - len(region.lstrip()), end + len(self.closing)
        at = text.find(answer, floor, ceiling) if answer else -1
        return (at, self._close(text, at + len(answer))) if at >= 0 else None

    def _next_turn(self, text: str, messages: list[Message], index: int) -> int:
        """A position before which turn ``index`` ends: the next turn's content."""
        if index + 1 == len(messages):
            return len(text)
        length = self._prefix_length(text, messages[: index + 2], prompt=False)
        if length is None:
            return len(text)
        at = text.rfind(messages[index + 1]["content"].strip(), 0, length)
        return at if at >= 0 else length

    def _close(self, text: str, end: int) -> int:
        return end + len(self.closing) * text.startswith(self.closing, end)

    def tokenize(self, chats: list[RenderedChat]) -> list[tuple[list[int], list[int]]]:
        """Token ids and loss mask of each chat, uncut, in one call of the tokenizer.

        ``add_special_tokens`` is off: a template writes its own BOS.
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


def mark_tokens(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """1 for every token that shares a character with a span, else 0.

    Byte-level post-processors may trim whitespace from offsets, to the point of an empty range;
    a token therefore begins no later than where the one before it ended.
    """
    if not offsets:
        return []
    begin, end = np.asarray(offsets, dtype=np.int64).T
    begin = np.minimum(begin, np.concatenate(([0], end[:-1])))
    mask = np.zeros(len(end), dtype=np.int8)
    for span_begin, span_end in spans:
        mask |= ((end > span_begin) & (begin < span_end)).astype(np.int8)
    return mask.tolist()
