"""Text of tokens as they arrive, at the same cost per token however long the text is."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
WINDOW = 32
"""Tokens that are decoded together before the older ones are dropped."""
KEPT = 8
"""Tokens that stay, as context of the next ones: a tokenizer strips the first space of a text."""
MAX_HELD = 64
"""Tokens without a complete character after which their text is taken as it is."""


class TextStream:
    """Makes text of tokens as they arrive, only up to the last complete character.

    Decoding all tokens at each new one would cost more the longer the text is. So only a window
    of the last tokens is decoded, and the new text is what follows the text that it had before.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer, self.skips_special = tokenizer, skip_special_tokens
        self.length = 0
        """Characters that were returned."""
        self._ids: list[int] = []
        self._shown = self._num_held = 0
        """Characters of the window that were returned; tokens since its last complete one."""
        self._text = ""
        """Text of the window."""

    def add(self, token: int) -> str:
        """Return the text that this token makes certain."""
        self._ids.append(token)
        before, self._text = self._text, self._decode(self._ids)
        is_open = self._text.endswith(UNKNOWN)
        if self._text == before and not is_open and (before or len(self._ids) > MAX_HELD):
            self._ids.pop()  # a token without text: no context of any other
            return ""
        self._num_held += 1
        if is_open and self._num_held < MAX_HELD:
            return ""
        is_garbled, self._num_held = self._num_held == MAX_HELD, 0
        piece = self.rest()
        if is_garbled:
            self._ids, self._text, self._shown = [], "", 0
        elif len(self._ids) >= WINDOW:
            self._drop()
        return piece

    def rest(self) -> str:
        """Return what was held back: an incomplete last character."""
        piece = self._text[self._shown :]
        self._shown = len(self._text)
        self.length += len(piece)
        return piece

    def finish(self, text: str) -> str:
        """Return the rest of the whole text, an incomplete last character included."""
        first, self.length = self.length, len(text)
        return text[first:]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.skips_special))

    def _drop(self) -> None:
        """Shorten the window to its last tokens, beginning where a character does."""
        for count in range(KEPT, 2 * KEPT):
            ids = self._ids[-count:]
            text = self._decode(ids)
            if text and self._text.endswith(text) and text[0] != UNKNOWN:
                self._ids, self._text, self._shown = ids, text, len(text)
                return


class PrintedText(TextStream):
    """Prints what it makes."""

    def __call__(self, token: int) -> None:
        sys.stdout.write(self.add(token))
        sys.stdout.flush()

    def finish_line(self, text: str) -> None:
        """Print what was held back."""
        print(self.finish(text))
