"""Count accepted draft tokens by group: context length, place in the answer, language, text kind
and text entropy.

The counts come from decoded turns, so they also work for other projects' heads. With an
evaluation's complete traces, you need no decoding. Data recipes mix rows by the same groups.
``metrics`` computes acceptance by the target's entropy.
"""

import math
from bisect import bisect_right
from collections import Counter
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
"""DIMENSION/GROUP -> tested draft tokens, accepted draft tokens, rounds, tokens in these rounds."""
TAIL_TOKENS = 8
"""Number of last prompt tokens to search for the start of a thinking block."""
PLACE_EDGES = (0, 32, 128, 512, 2048)
"""Group edges for a token's place in the answer. Each group contains its lower edge."""
WINDOW = 64
"""Window for the text entropy at a place: the 64 tokens before it."""
TEXT_ENTROPY_EDGES = (0, 2, 2.5, 3, 3.5)
"""Group edges for text entropy, in nats. 64 tokens have an entropy of at most ln 64 = 4.16."""
SEVERAL = "several"
"""Segment name for a turn with several text kinds, if its rounds have no known places."""


def token_segments(result: DecodeResult, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Yield each token's text kind, in the order of ``token_ids``."""
    tail = str(tokenizer.decode(result.prompt_ids[-TAIL_TOKENS:])).rstrip()
    start = THINKING if tail.endswith("<think>") else ANSWER
    pieces = [str(tokenizer.decode([token])) for token in result.token_ids]
    runs, end = segments_of("".join(pieces), start), 0
    for piece in pieces:
        end += len(piece)
        while len(runs) > 1 and runs[0][0] < end:
            runs = runs[1:]
        yield runs[0][1] if runs else start


def text_entropy(ids: Sequence[int]) -> float:
    """Return the tokens' unigram entropy, in nats. Repetitive text has a low entropy.

    H = -sum_v (c_v / W) ln (c_v / W), where token v occurs c_v times among W tokens
    """
    total = sum(count * math.log(count) for count in Counter(ids).values())
    return math.log(len(ids)) - total / len(ids)


def _variety(ids: Sequence[int], end: int) -> str:
    """Return the text entropy group at ``end``, or "start" within the first WINDOW tokens."""
    if end < WINDOW:
        return "start"
    # If all tokens are equal, rounding can make the entropy slightly negative.
    entropy = max(text_entropy(ids[end - WINDOW : end]), 0.0)
    return str(TEXT_ENTROPY_EDGES[bisect_right(TEXT_ENTROPY_EDGES, entropy) - 1])


def count_groups(
    result: DecodeResult, answer: str, question: str, tokenizer: "PreTrainedTokenizerBase"
) -> GroupCounts:
    """Count a turn's tested draft tokens and rounds by group.

    Without ``round_ends``, the rounds' places are unknown. Then the whole turn counts in three
    groups: its prompt's length, its language, and its segment.

    Args:
        question: used to recognize the language if the answer is not enough.
    """
    language = language_of(prose(answer))
    language = language_of(question) if language == "unknown" else language
    segments = list(token_segments(result, tokenizer))
    if result.round_lengths and not result.round_ends:
        kinds = set(segments)
        kind = kinds.pop() if len(kinds) == 1 else SEVERAL
        context = context_of(len(result.prompt_ids))
        names = (f"context/{context}", f"segment/{kind}", f"language/{language}")
        lengths = result.round_lengths
        counts = [result.num_tested, result.num_accepted, len(lengths), sum(lengths)]
        return {name: list(counts) for name in names}
    ids = [*result.prompt_ids, *result.token_ids]

    def counted(index: int, *values: int) -> GroupCounts:
        end = len(result.prompt_ids) + index
        place = PLACE_EDGES[bisect_right(PLACE_EDGES, index) - 1]
        names = (
            *(f"context/{context_of(end)}", f"place/{place}", f"segment/{segments[index]}"),
            *(f"language/{language}", f"text entropy/{_variety(ids, end)}"),
        )
        return {name: list(values) for name in names}

    parts = [counted(index, 1, accepted, 0, 0) for index, accepted in token_tests(result)]
    first = 1  # after the token from the prefill
    for length in filter(None, result.round_lengths):
        parts.append(counted(first, 0, 0, 1, length))
        first += length
    return sum_groups(parts)


def sum_groups(parts: Iterable[GroupCounts]) -> GroupCounts:
    """Add up the counts by group."""
    total: GroupCounts = {}
    for part in parts:
        for name, values in part.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0] * 4), values, strict=True)]
    return total


def _order(name: str) -> tuple[str, float, str]:
    dimension, _, group = name.partition("/")
    is_number = group.replace(".", "", 1).isdecimal()
    return dimension, float(group) if is_number else -1.0, group


def acceptance_by_group(rows: Sequence[PromptRecord]) -> list[GroupRecord]:
    """Return one record per group with at least one round or tested draft token."""
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
