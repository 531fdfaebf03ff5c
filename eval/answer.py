"""Find an answer's final number, and score it as GSM8K does."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

PASSED = "passed"
DIGITS = r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.\d+|\d+)"
# A minus after a word, a number or a bracket is the operator; a number after ^ is an exponent.
NUMBER = re.compile(r"(?<!\^)(?<!\^\{)(?P<minus>(?<![\w)\]}])-\\?\$?|\$-)?" + DIGITS)
MARKED = re.compile(
    r"(?<!#)####(?!#)[\s*$\\=:(]*(?:\\?boxed\{\\?\$?)?(?P<minus>-\\?\$?)?[$€£\\+]*" + DIGITS
)
"""GSM8K's mark before the result."""
HEADING = re.compile(r"[.)]\**\s+\S")
"""Text after the number in a numbered heading, "#### 1. Eggs"."""
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[!,;: ]|[~'\u2019\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
"""Thousands separators in LaTeX and typography, besides the comma."""
DASHES = str.maketrans(dict.fromkeys("\u2212\u2013\u2010\u2011\uff0d", "-"))


@dataclass(frozen=True)
class Score:
    """One answer's score."""

    passed: bool
    outcome: str
    """PASSED, or the answer's fault."""


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return value.copy_negate() if match["minus"] else value


def find_number(answer: str) -> Decimal | None:
    """Return the answer's final number, or None if there is none.

    GSM8K's published rule takes the number after the first "####", wherever it is. Without "####",
    take the last number in the last \\boxed{..} with a number. If no box has one, take the last
    number. Thousands separators, units and reasoning before "</think>" are ignored. Numbers are
    compared by value: 1,250.50 is $1250.5.
    """
    _, mark, rest = answer.rpartition("</think>")
    text = (rest if mark and NUMBER.search(rest) else answer).translate(DASHES).rstrip()
    text = THOUSANDS.sub(",", text)
    marked = list(MARKED.finditer(text))
    numbered = [match for match in marked if HEADING.match(text, match.end())]
    if len(numbered) > 1:  # step headings, with no number as a result
        marked = [match for match in marked if match not in numbered]
    if marked:
        return _value(marked[0])
    for part in (*reversed(list(_boxes(text))), text):
        found = list(NUMBER.finditer(part))
        if found:
            return _value(found[-1])
    return None


def _boxes(text: str) -> Iterator[str]:
    """Yield the contents of every \\boxed{..}, which may contain balanced braces."""
    for start in re.finditer(r"\\f?box(?:ed)?\s*\{", text):
        depth, end = 1, start.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield text[start.end() : end if depth else end - 1]


def score_answer(expected: Decimal, answer: str) -> Score:
    number = find_number(answer)
    if number is None:
        return Score(False, "no number")
    right = number == expected
    return Score(right, PASSED if right else f"{number} for {expected}")
