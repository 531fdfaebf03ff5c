"""Count acceptance by context length, by language and by kind of text.

Counts come from decoded turns, so they cover any head, from this project or another. If an
evaluation's traces are complete, counting decodes nothing. Data recipes mix rows by the same
groups. ``metrics`` counts acceptance by the target's entropy.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from ..data_recipes.groups import (
    ANSWER,
    THINKING,
    context_of,
    language_of,
    prose,
    segments_of,
)
from ..inference.result import DecodeResult, ratio
from .metrics import rate_fields, token_tests
from .record import GroupRecord, PromptRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GroupCounts = dict[str, list[int]]
"""DIMENSION/GROUP -> tests, accepted tests, rounds, tokens in these rounds."""
TAIL_TOKENS = 8
"""Tokens at the prompt's end to search for an opened thinking block."""


def token_segments(result: DecodeResult, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Yield the kind of text to which each entry in ``token_ids`` belongs."""
    tail = str(tokenizer.decode(result.prompt_ids[-TAIL_TOKENS:])).rstrip()
    start = THINKING if tail.endswith("<think>") else ANSWER
    pieces = [str(tokenizer.decode([token])) for token in result.token_ids]
    runs, end = segments_of("".join(pieces), start), 0
    for piece in pieces:
        end += len(piece)
        while len(runs) > 1 and runs[0][0] < end:
            runs = runs[1:]
        yield runs[0][1] if runs else start


def count_groups(
    result: DecodeResult, answer: str, question: str, tokenizer: "PreTrainedTokenizerBase"
) -> GroupCounts:
    """Count a turn's tested draft tokens and its rounds by group.

    Args:
        question: decides the language if the answer does not show one.
    """
    language = language_of(prose(answer))
    language = language_of(question) if language == "unknown" else language
    segments = list(token_segments(result, tokenizer))

    def counted(index: int, *values: int) -> GroupCounts:
        context = context_of(len(result.prompt_ids) + index)
        names = (f"context/{context}", f"segment/{segments[index]}", f"language/{language}")
        return {name: list(values) for name in names}

    parts = [counted(index, 1, accepted, 0, 0) for index, accepted in token_tests(result)]
    first = 1  # after the token from the prefill
    for length in filter(None, result.round_lengths):
        parts.append(counted(first, 0, 0, 1, length))
        first += length
    return sum_groups(parts)


def sum_groups(parts: Iterable[GroupCounts]) -> GroupCounts:
    """Add up counts, group by group."""
    total: GroupCounts = {}
    for part in parts:
        for name, values in part.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0] * 4), values, strict=True)]
    return total


def _order(name: str) -> tuple[str, int, str]:
    dimension, _, group = name.partition("/")
    return dimension, int(group) if dimension == "context" else 0, group


def acceptance_by_group(rows: Sequence[PromptRecord]) -> list[GroupRecord]:
    """Return one record for each group with a round or a tested draft token."""
    counted = [row.groups for row in rows if row.groups is not UNSET]
    found = []
    for name in sorted({name for counts in counted for name in counts}, key=_order):
        own_P4 = np.array([counts[name] for counts in counted if name in counts])
        tests_P, accepts_P, rounds_P, tokens_P = own_P4.T
        found.append(
            GroupRecord(
                group=name,
                prompts=len(own_P4),
                rounds=int(rounds_P.sum()),
                mean_acceptance_length=ratio(float(tokens_P.sum()), float(rounds_P.sum())),
                **rate_fields(accepts_P, tests_P),
            )
        )
    return found
