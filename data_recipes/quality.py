"""Filters that leave rows out: each is off unless it is set, and counted under its own name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipedraft.data_recipes.words import CJK

CJK_CHARACTER = re.compile(f"[{CJK}]")
FILTERED = "filter: "
SHARES = ("max_non_alphabetic", "max_repeated_lines", "min_cjk", "max_cjk")
CONVERSATIONS_ONLY = ("min_turns", "max_turns")


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Limits that a row must keep, all inclusive; null: no limit.

    Characters, letters and lines are those of all turns, system prompts included.
    """

    min_turns: int | None = None
    """Turns of the user and the assistant together; for conversations only."""
    max_turns: int | None = None
    min_characters: int | None = None
    max_characters: int | None = None
    min_tokens: int | None = None
    """Tokens of the whole row, as the target reads it; for more than max_length see too_long."""
    max_non_alphabetic: float | None = None
    """Share of the characters other than white space that are no letters of any script."""
    max_repeated_lines: float | None = None
    """Share of the lines with text that are equal to an earlier one."""
    min_cjk: float | None = None
    """Share of the letters that are Chinese or Japanese."""
    max_cjk: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is None:
                continue
            most = 1 if field.name in SHARES else float("inf")
            if not 0 <= limit <= most:
                mend = "a share from 0 to 1" if field.name in SHARES else "0 or more"
                raise ValueError(f"sources.filters.{field.name}: {limit}; give {mend}, or null")
        for name in ("turns", "characters", "cjk"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"sources.filters.min_{name}: {least} is above max_{name} = {most}, which "
                    "leaves no row; swap them or leave one out"
                )

    @property
    def conversation_limits(self) -> list[str]:
        """The limits set that a text document cannot meet or miss."""
        return [name for name in CONVERSATIONS_ONLY if getattr(self, name) is not None]

    def refuse(self, texts: Sequence[str], num_turns: int | None) -> tuple[str, float]:
        """The first limit that a row misses and its value there; ("", 0) for a good row.

        Args:
            texts: contents of all turns, or the one document.
            num_turns: turns of user and assistant; None for a document.
        """
        num_characters = sum(map(len, texts))
        if num_turns is not None:
            if self.min_turns is not None and num_turns < self.min_turns:
                return "min_turns", num_turns
            if self.max_turns is not None and num_turns > self.max_turns:
                return "max_turns", num_turns
        if self.min_characters is not None and num_characters < self.min_characters:
            return "min_characters", num_characters
        if self.max_characters is not None and num_characters > self.max_characters:
            return "max_characters", num_characters
        if self.max_non_alphabetic is not None:
            share = non_alphabetic_share(texts)
            if share > self.max_non_alphabetic:
                return "max_non_alphabetic", share
        if self.max_repeated_lines is not None:
            share = repeated_line_share(texts)
            if share > self.max_repeated_lines:
                return "max_repeated_lines", share
        if self.min_cjk is not None or self.max_cjk is not None:
            share = cjk_share(texts)
            if self.min_cjk is not None and share < self.min_cjk:
                return "min_cjk", share
            if self.max_cjk is not None and share > self.max_cjk:
                return "max_cjk", share
        return "", 0

    def refuse_tokens(self, num_tokens: int) -> bool:
        return self.min_tokens is not None and num_tokens < self.min_tokens


def count_letters(texts: Sequence[str]) -> int:
    return sum(sum(map(str.isalpha, text)) for text in texts)


def non_alphabetic_share(texts: Sequence[str]) -> float:
    """1 for a row without any character but white space."""
    visible = sum(len(part) for text in texts for part in text.split())
    return 1 - count_letters(texts) / visible if visible else 1.0


def repeated_line_share(texts: Sequence[str]) -> float:
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def cjk_share(texts: Sequence[str]) -> float:
    """0 for a row without letters."""
    letters = count_letters(texts)
    found = sum(len(CJK_CHARACTER.findall(text)) for text in texts)
    return min(1.0, found / letters) if letters else 0.0
