"""Count what the rows of a file ask from the target, by a sample of them."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from ...chats import render_chat
from ...data_recipes.answers import TURNS, Dialogue, RowFailed
from ...data_recipes.config import Source
from ...data_recipes.conversations import in_messages, read_row
from ...data_recipes.sources import RawRow, read_source
from ...errors import UsageError

SAMPLED = 500
"""Rows to read, which takes a second or two."""


@dataclass(frozen=True)
class Limits:
    """Most tokens of one answer, and of one row in training."""

    answer: int
    row: int


@dataclass(frozen=True)
class Lengths:
    """Means per row of a file, in tokens."""

    num_answers: float
    answers: float
    """Tokens in all answers of a row."""
    most_turns: int
    """Most answers of one row."""
    most_answers: int
    """Most tokens in all answers of one row."""
    row: float
    """Tokens of a row in training, answers included."""
    is_bound: bool
    """Answers that the file lacks, or rows without a tokenizer, count with their limit."""
    left_out: dict[str, int]
    """Reason -> rows without a prompt for the target, among those read."""


def measure_rows(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, limits: Limits
) -> Lengths:
    """Estimate the tokens of a file's rows, if the target answers as long as the file does.

    Args:
        tokenizer: None counts the limits.

    Raises:
        UsageError: no row can be answered.
    """
    counts: list[tuple[int, int, int, bool]] = []
    reasons = Counter[str]()
    for number, raw in enumerate(read_source(replace(source, max_rows=SAMPLED))):
        try:
            if raw.error:
                raise RowFailed(raw.error)
            counts.append(_count(raw, Dialogue.read(number, raw.text), tokenizer, limits))
        except (RowFailed, ValueError) as error:  # ValueError: the chat template refuses the turns
            reasons[str(error)] += 1
    if not counts:
        ((reason, number),) = reasons.most_common(1)
        raise UsageError(
            f"--data: no row of {source.path} has a prompt for the target ({number} times: "
            f"{reason}); give prompts or conversations, see docs/data.md"
        )
    answered, answers, rows, bounds = zip(*counts, strict=True)
    return Lengths(
        num_answers=fmean(answered),
        answers=fmean(answers),
        most_turns=max(answered),
        most_answers=max(answers),
        row=fmean(rows),
        is_bound=any(bounds),
        left_out=dict(reasons),
    )


def _count(
    raw: RawRow, dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase | None, limits: Limits
) -> tuple[int, int, int, bool]:
    """Return a row's answers, their tokens, all tokens, and True if some count with the limit."""
    number = len(dialogue.prompts)
    if tokenizer is None:
        return number, number * limits.answer, limits.row, True

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    texts = given_answers(raw.text)[:number]
    pairs = zip_longest(dialogue.prompts, texts, fillvalue="")
    turns = [x for prompt, text in pairs for x in (*prompt, {"role": "assistant", "content": text})]
    known = [length(text) if text else limits.answer for text in [*texts, *[""] * number][:number]]
    answers = sum(min(tokens, limits.answer) for tokens in known)
    rendered = render_chat(
        tokenizer, turns, prompt=False, tools=dialogue.tools, variables=dialogue.variables
    )
    row = length(rendered) - sum(map(length, texts)) + answers
    return number, answers, min(row, limits.row), not all(texts) or len(texts) < number


def given_answers(text: str) -> list[str]:
    """Return the answers in a row as read, "" for an empty one."""
    row = in_messages(json.loads(text))
    if not any(map(row.get, TURNS)):
        return []
    turns = read_row(row, needs_answers=False).messages
    following = [str(turn["role"]) for turn in turns[1:]] + [""]
    # A call before a tool's result stays as it is.
    return [
        str(turn["content"] or "")
        for turn, after in zip(turns, following, strict=True)
        if turn["role"] == "assistant" and after != "tool"
    ]
