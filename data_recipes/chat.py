"""Turn conversations into token ids and assistant loss masks, for any chat template.

Masks are made from character spans in the rendered text. The text is tokenized once with offsets,
never in pieces, because BPE merges across the seams.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..chats import (
    END_THINK,
    THINK,
    ChatRefused,
    check_template_variables,
    render_chat,
    render_turns,
    with_thinking,
)
from ..files import Values
from .conversations import Conversation, Message, thinking_of
from .turns import find_turns

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "pipedraftprobe"


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

    Turn i starts where its text leaves render(messages[:i], add_generation_prompt=True), and ends
    with the tokens that close it (``turns``). So everything that the target writes behind the
    prompt is supervised, and no token of the prompt. Where an earlier turn is rendered otherwise
    than as the last one, its text in place counts. A template's ``{% generation %}`` marks can
    only take text away.
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
        found = self._find(given)
        if self.keeps_thinking:
            found = self._put_back(found, given)
        return replace(found, not_rendered=unrendered(given, found.text))

    def _render(self, chat: Conversation, messages: Sequence[Message], *, prompt: bool) -> str:
        return render_chat(
            self.tokenizer, messages, prompt=prompt, tools=chat.tools, variables=chat.variables
        )

    def _find(self, chat: Conversation) -> RenderedChat:
        """Render a chat and find what the target writes."""
        text = self._render(chat, chat.messages, prompt=False)
        turns = find_turns(
            chat.messages,
            text,
            lambda messages, prompt: self._render(chat, messages, prompt=prompt),
            [*self.tokenizer.get_added_vocab()],
        )
        answers = [message for message in chat.messages if message["role"] == "assistant"]
        spans = [
            span
            for turn in turns
            if chat.messages[turn.index].get("train", True)
            for span in ([(turn.start, turn.end)] if turn.end > turn.start else [])
        ]
        if self.marks_generation:
            marks, closings = self._marks(chat, text), {turn.end: turn.closing for turn in turns}
            spans = [part for span in spans for part in within(span, marks, closings[span[1]])]
        return RenderedChat(text, spans, len(answers) - len(turns))

    def _marks(self, chat: Conversation, text: str) -> list[tuple[int, int]]:
        """Return the character ranges in the template's generation marks."""
        variables: Values = dict(self.tokenizer.special_tokens_map) | chat.variables

        def render(turns: list[Values]) -> str:
            # Annotated as str, returns (texts, generation marks of each text).
            rendered: Any = render_jinja_template(
                [turns],
                tools=chat.tools,  # type: ignore[arg-type]
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **variables,
            )
            marks[:] = rendered[1][0]
            return rendered[0][0]

        marks: list[tuple[int, int]] = []
        messages = [with_thinking(message, self.template) for message in chat.messages]
        same = render_turns(messages, render) == text
        return marks if same else [(0, len(text))]

    def _put_back(self, found: RenderedChat, chat: Conversation) -> RenderedChat:
        """Put the last turn's thinking back into the chat, as the target generates it.

        DeepSeek-R1's distilled models open the thinking in the prompt for an answer. Their template
        strips the thinking from all answers in a conversation.
        """
        last = chat.messages[-1]
        thought, answer = thinking_of(last)
        earlier = replace(chat, messages=chat.messages[:-1])
        if last["role"] != "assistant" or not thought or thought in found.text:
            return found
        if not earlier.messages or last.get("tool_calls"):
            return found
        try:
            prompt = self._render(earlier, earlier.messages, prompt=True)
        except ChatRefused:
            return found
        opens = prompt.rstrip().endswith(THINK)
        is_off = prompt.rstrip().endswith(END_THINK)  # enable_thinking: false
        if is_off or (not opens and END_THINK not in self.template):
            return found
        head = ("" if prompt.endswith("\n") else "\n") if opens else f"{THINK}\n"
        own = f"{head}{thought}\n{END_THINK}\n\n{answer.strip()}{self.closing}"
        before = self._find(earlier)
        # In the earlier turns' own text, which the prompt begins with, nothing moves.
        spans = [span for span in before.spans if prompt.startswith(before.text[: span[1]])]
        num_missing = before.num_missing + len(before.spans) - len(spans)
        if last.get("train", True):
            spans.append((len(prompt), len(prompt) + len(own)))
        return RenderedChat(prompt + own, spans, num_missing, has_thinking_back=True)

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


def within(
    span: tuple[int, int], marks: list[tuple[int, int]], closing: int
) -> list[tuple[int, int]]:
    """Return a turn's parts in generation marks. A mark up to the closing tokens includes them."""
    start, end = span
    parts = [(max(start, a), end if closing <= b else b) for a, b in marks if a < end and b > start]
    return [(a, b) for a, b in parts if b > a]


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
