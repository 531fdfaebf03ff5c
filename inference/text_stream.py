"""Incremental detokenization at constant cost per token."""

import sys
from typing import TYPE_CHECKING

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
        self.length = 0
        """Number of characters returned so far."""
        self._ids: list[int] = []
        self._shown = self._num_held = 0
        """Returned characters in the window; tokens since its last complete character."""
        self._text = ""
        """Text in the window."""

    def add(self, token: int) -> str:
        """Return the text completed by this token."""
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


class PrintedText(TextStream):
    """Text stream printed to stdout as tokens arrive."""

    def __call__(self, token: int) -> None:
        sys.stdout.write(self.add(token))
        sys.stdout.flush()

    def finish_line(self, text: str) -> None:
        """Print the held-back text."""
        print(self.finish(text))
