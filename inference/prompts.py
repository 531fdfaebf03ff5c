"""A prompt from the command line to token ids, and tokens to text on the terminal."""

import sys
from typing import Any


class Stream:
    """Prints text as tokens arrive, only up to the last complete character."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.printed = tokenizer, 0
        self.ids: list[int] = []

    def __call__(self, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(text[self.printed :])
            sys.stdout.flush()
            self.printed = len(text)

    def finish(self, text: str) -> None:
        """Print what was held back, an incomplete last character included."""
        print(text[self.printed :])


def encode(tokenizer: Any, text: str, raw: bool) -> list[int]:
    if raw or tokenizer.chat_template is None:
        return tokenizer(text).input_ids
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(rendered, add_special_tokens=False).input_ids
