"""Group texts by context length, language and text kind, for acceptance figures."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ..chats import inline_thinking
from .conversations import Message

CONTEXT_EDGES = (0, 512, 1024, 2048, 4096, 8192, 16384)
"""Context edges in tokens. Each group ends below the next edge; the last is open."""
ANSWER, CODE, THINKING, TOOL_CALL = "answer", "code", "thinking", "tool call"
SEGMENTS = (TOOL_CALL, THINKING, CODE, ANSWER)
"""Segment kinds in assistant text. A row gets the first kind found in it."""
WORDS = {
    "en": "the of and to is that it was for you with are this have not",
    "de": "der die und das ist nicht ein eine zu den mit von sich auf ich",
    "fr": "le les et des est que une dans pour qui pas sur vous du avec",
    "es": "el los y que una es por con para las del como más su se",
    "it": "il che di è una per non sono della con gli nel la un anche",
    "pt": "o os e que uma não para com é do da em mais um as",
    "nl": "de het een van en is niet dat op te zijn voor met ook aan",
    "da": "og det er at en af ikke på til der med jeg den har som",
    "sv": "och det är att en av inte på som för jag med ett har till",
    "pl": "i w nie na się że z do to jest jak o po dla co",
    "tr": "bir ve bu için ile çok de da ne daha olarak gibi en var o",
    "vi": "và của là có trong được cho không một các với người này những để",
    "id": "yang dan di untuk dengan ini itu dari pada tidak adalah ke dalam akan saya",
}
"""Frequent words per language in Latin letters; any other alphabet decides the group by itself."""
WORD_SETS = {name: frozenset(words.split()) for name, words in WORDS.items()}
ALPHABETS = {"cjk": "zh", "hangul": "ko", "hiragana": "ja", "katakana": "ja"}
MOST_CHARACTERS = 4000
OPENING = {
    "<think>": THINKING,
    "<|channel|>analysis": THINKING,
    "```": CODE,
    "<tool_call>": TOOL_CALL,
    "<|tool_call|>": TOOL_CALL,
    "<|python_tag|>": TOOL_CALL,
    "[TOOL_CALLS]": TOOL_CALL,
    "<|channel|>commentary": TOOL_CALL,
}
CLOSING = {"</think>": THINKING, "</tool_call>": TOOL_CALL, "```": CODE}
FINAL = "<|channel|>final"
MARKS = re.compile("|".join(map(re.escape, {**OPENING, **CLOSING, FINAL: ""})))


def context_of(num_tokens: int) -> str:
    """Return the context group for a length in tokens."""
    low = max(edge for edge in CONTEXT_EDGES if edge <= num_tokens)
    return str(low)


def language_of(text: str) -> str:
    """Return a language code, the name of an alphabet with several languages, or "unknown"."""
    text = text[:MOST_CHARACTERS]
    alphabets: Counter[str] = Counter()
    for letter, times in Counter(filter(str.isalpha, text)).items():
        alphabets[unicodedata.name(letter, "unknown").split(maxsplit=1)[0].lower()] += times
    if not alphabets:
        return "unknown"
    if alphabets["hiragana"] + alphabets["katakana"] > 0.1 * alphabets.total():
        return "ja"
    alphabet = alphabets.most_common(1)[0][0]
    if alphabet != "latin":
        return ALPHABETS.get(alphabet, alphabet)
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    hits = {name: sum(words[word] for word in known) for name, known in WORD_SETS.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] > 1 else "unknown"


def segments_of(text: str, start: str = ANSWER) -> list[tuple[int, str]]:
    """Return (end, kind) for each stretch of one kind in a text that begins with kind ``start``."""
    runs, kind = [], start
    for mark in MARKS.finditer(text):
        found = mark.group()
        if kind != ANSWER and (CLOSING.get(found) == kind or found == FINAL):
            runs.append((mark.end(), kind))
            kind = ANSWER
        elif found in OPENING and kind == ANSWER:
            runs.append((mark.start(), kind))
            kind = OPENING[found]
    return [run for run in [*runs, (len(text), kind)] if run[0]]


def prose(text: str) -> str:
    """Strip code and tool calls, because their words belong to no language."""
    parts, begin = [], 0
    for end, kind in segments_of(text):
        if kind not in (CODE, TOOL_CALL):
            parts.append(text[begin:end])
        begin = end
    return "".join(parts)


def groups_of(messages: Sequence[Message]) -> tuple[str, str]:
    """Return the language and the segment (text kind) for a conversation's answers."""
    turns = [inline_thinking(m) for m in messages if m["role"] == "assistant"]
    text = "\n".join(turn["content"] for turn in turns)
    kinds = {kind for turn in turns for _, kind in segments_of(turn["content"])}
    if any(turn.get("tool_calls") for turn in turns):
        kinds.add(TOOL_CALL)
    return language_of(prose(text)), next((x for x in SEGMENTS if x in kinds), ANSWER)


def check_shares(shares: Mapping[str, float]) -> None:
    """Raise ValueError for an unknown group, or if a dimension's shares exceed 1 in total."""
    for name, share in shares.items():
        dimension, _, group = name.partition("/")
        edges = map(str, CONTEXT_EDGES)
        known = {"context": edges, "segment": SEGMENTS, "language": (group,)}.get(dimension, ())
        if not group or group not in known:
            raise ValueError(
                f"data.group_shares: {name!r} is no group; give language/de (a code), segment/KIND "
                f"({', '.join(SEGMENTS)}) or context/TOKENS ({', '.join(map(str, CONTEXT_EDGES))})"
            )
        total = sum(x for other, x in shares.items() if other.startswith(f"{dimension}/"))
        if not 0 < share <= 1 or total > 1 + 1e-9:
            raise ValueError(
                f"data.group_shares: {name}: {share}, {dimension} together {total:g}; give shares "
                "above 0, of each dimension at most 1 together"
            )


def balance(
    weights_N: np.ndarray, groups: Mapping[str, np.ndarray], shares: Mapping[str, float]
) -> np.ndarray:
    """Return weights with which each group gets its share of rows on average.

    The total weight stays the same. Rows outside the named groups keep their proportions.
    Several dimensions are fitted in turn.

    Args:
        groups: dimension -> each row's group.

    Raises:
        ValueError: a group has no rows.
    """
    weights_N, total = weights_N.astype(np.float64), weights_N.sum()
    wanted: dict[str, dict[str, float]] = {dimension: {} for dimension in groups}
    for name, share in shares.items():
        dimension, _, group = name.partition("/")
        wanted[dimension][group] = share
        if not weights_N[groups[dimension] == group].any():
            raise ValueError(
                f"data.group_shares: no good row is of {name}; add a source that has some"
            )
    for _ in range(1 if len([own for own in wanted.values() if own]) < 2 else 50):
        for dimension, own in wanted.items():
            parts = [(groups[dimension] == group, share) for group, share in own.items()]
            rest = ~np.isin(groups[dimension], list(own))
            for mask, share in [*parts, (rest, 1 - sum(own.values()))] if own else ():
                if held := weights_N[mask].sum():
                    weights_N[mask] *= share * total / held
    return weights_N
