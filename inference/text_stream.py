"""Incremental detokenization."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from ..responses import Part, Response, format_marks, reader_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 64
"""Maximum tokens without a complete character. After these, the text is used as it is."""


class TextStream:
    """Turns tokens into text as they arrive, up to the last complete character."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer, self.skips_special = tokenizer, skip_special_tokens
        self.marks = format_marks(tokenizer) if skip_special_tokens else {}
        """Special tokens whose text stays."""
        self.length = 0
        """Number of characters returned so far."""
        self._start()

    def _start(self) -> None:
        self._held: list[int] = []
        """Tokens since the last complete character."""
        self._next = _slow_step(self.tokenizer, self.skips_special)
        if (backend := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:
            self._next = partial(DecodeStream(skip_special_tokens=self.skips_special).step, backend)

    def add(self, token: int) -> str:
        """Return the text completed by this token."""
        if mark := self.marks.get(token):
            piece = self.rest() + mark
            self.length += len(mark)
            self._start()
            return piece
        self._held.append(token)
        if piece := self._next(token) or "":
            self._held = []
        elif len(self._held) == MAX_HELD:
            # Bytes that never become a character must not stop the stream.
            piece = self._decode_held()
            self._start()
        self.length += len(piece)
        return piece

    def rest(self) -> str:
        """Return the text not returned yet, including an incomplete last character."""
        piece, self._held = self._decode_held(), []
        self.length += len(piece)
        return piece

    def finish(self, text: str) -> str:
        """Return the rest of the whole text, including an incomplete last character."""
        first, self.length = self.length, len(text)
        return text[first:]

    def _decode_held(self) -> str:
        return str(self.tokenizer.decode(self._held, skip_special_tokens=self.skips_special))


def _slow_step(
    tokenizer: "PreTrainedTokenizerBase", skips_special: bool
) -> Callable[[int], str | None]:
    """Return a ``DecodeStream.step`` for tokenizers of other libraries."""
    ids: list[int] = []
    num_shown = 0

    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=skips_special))

    def step(token: int) -> str | None:
        nonlocal num_shown
        ids.append(token)
        # The last shown tokens stay as context: tokenizers strip the first space in a text.
        text, before = decode(ids), decode(ids[:num_shown])
        if len(text) <= len(before) or text.endswith(UNKNOWN):
            return None
        del ids[:num_shown]
        num_shown = len(ids)
        return text[len(before) :]

    return step


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
