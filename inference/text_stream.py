"""Incremental detokenization at constant cost per token."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..responses import Part, Response, format_marks, reader_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
WINDOW = 32
"""Tokens decoded together before older ones are dropped."""
KEPT = 8
"""Tokens retained as context, because a tokenizer strips the first space in a text."""
MAX_HELD = 64
"""Maximum tokens without a complete character. After these, the text is used as it is."""


class TextStream:
    """Turns tokens into text as they arrive, up to the last complete character.

    Only a window with the last tokens is decoded, at constant cost. The new text is the part after
    the window's previous text.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer, self.skips_special = tokenizer, skip_special_tokens
        self.marks = format_marks(tokenizer) if skip_special_tokens else {}
        """Special tokens whose text stays."""
        self.length = 0
        """Number of characters returned so far."""
        self._ids: list[int] = []
        self._shown = self._num_held = 0
        """Returned characters in the window; tokens since its last complete character."""
        self._text = ""
        """Text in the window."""

    def add(self, token: int) -> str:
        """Return the text completed by this token."""
        if mark := self.marks.get(token):
            piece = self.rest() + mark
            self.length += len(mark)
            self._ids, self._text, self._shown, self._num_held = [], "", 0, 0
            return piece
        self._ids.append(token)
        before, self._text = self._text, self._decode(self._ids)
        is_open = self._text.endswith(UNKNOWN)
        if self._text == before and not is_open and (before or len(self._ids) > MAX_HELD):
            self._ids.pop()  # A token without text is context for no other token.
            return ""
        self._num_held += 1
        if is_open and self._num_held < MAX_HELD:
            return ""
        # Bytes that never become a character must not stop the stream.
        is_garbled, self._num_held = self._num_held == MAX_HELD, 0
        piece = self.rest()
        if is_garbled:
            self._ids, self._text, self._shown = [], "", 0
        elif len(self._ids) >= WINDOW:
            self._drop()
        return piece

    def rest(self) -> str:
        """Return the text not returned yet, including an incomplete last character."""
        piece = self._text[self._shown :]
        self._shown = len(self._text)
        self.length += len(piece)
        return piece

    def finish(self, text: str) -> str:
        """Return the rest of the whole text, including an incomplete last character."""
        first, self.length = self.length, len(text)
        return text[first:]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.skips_special))

    def _drop(self) -> None:
        """Shorten the window to its last tokens, starting at a character boundary."""
        for count in range(KEPT, 2 * KEPT):
            ids = self._ids[-count:]
            text = self._decode(ids)
            # A shorter context may decode differently; use a cut that changes no text.
            if text and self._text.endswith(text) and text[0] != UNKNOWN:
                self._ids, self._text, self._shown = ids, text, len(text)
                return


class AnswerStream:
    """Turns an answer's tokens into parts for its fields: thinking, content, tool calls.

    Without a response template, everything is content, and equal to a ``TextStream``'s text.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt: Sequence[int] | None,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            prompt: the chat prompt's tokens, which may have begun the answer; None for raw text.
        """
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
        self._reader = None if prompt is None else reader_for(tokenizer, prompt)

    @property
    def response(self) -> Response | None:
        """Return the answer so far, or None if answers are plain text."""
        return None if self._reader is None else self._reader.response

    def add(self, token: int) -> list[Part]:
        """Return the parts completed by this token."""
        if self._reader is None:
            return self._plain(self._stream.add(token))
        mark = self._reader.marks.get(token)
        text = self._stream.add(token) if mark is None else self._stream.rest() + mark
        return self._reader.feed(text)

    def finish(self) -> list[Part]:
        """Return the rest, including an incomplete last character."""
        rest = self._stream.rest()
        if self._reader is None:
            return self._plain(rest)
        return [*self._reader.feed(rest), *self._reader.finish()]

    @staticmethod
    def _plain(text: str) -> list[Part]:
        return [Part("content", text)] if text else []


class PrintedAnswer(AnswerStream):
    """Answer printed as tokens arrive: the content to stdout, the thinking to stderr."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt: Sequence[int] | None,
        *,
        shows_thinking: bool = True,
    ) -> None:
        super().__init__(tokenizer, prompt)
        self.shows_thinking = shows_thinking
        self._is_thinking = False

    def __call__(self, token: int) -> None:
        self._print(self.add(token))

    def finish_line(self) -> None:
        """Print the held-back text and the tool calls."""
        self._print(self.finish())
        self._end_thinking()
        calls = self.response.tool_calls if self.response is not None else []
        for call in calls:
            print(json.dumps(call["function"], ensure_ascii=False))
        if not calls or (self.response is not None and self.response.content):
            print()

    def _print(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.field == "content":
                self._end_thinking()
                sys.stdout.write(part.text)
                sys.stdout.flush()
            elif part.field == "thinking" and self.shows_thinking:
                sys.stderr.write("" if self._is_thinking else "thinking: ")
                sys.stderr.write(part.text)
                sys.stderr.flush()
                self._is_thinking = True

    def _end_thinking(self) -> None:
        if self._is_thinking:
            sys.stderr.write("\n\n")
            self._is_thinking = False
