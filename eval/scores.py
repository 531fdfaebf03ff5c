"""Score answers with GSM8K's accuracy, and write files for other harnesses.

Lossless decoding does not change the output, so every score is the target's own. Every method is
scored anyway, to expose a method that changes answers. Generated programs are not run here:
evalplus and lm-evaluation-harness score the files from ``save_answers``.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from ..cli import UsageError, make_folder
from ..files import write_atomically
from .intervals import wilson_interval
from .record import ScoreRecord

if TYPE_CHECKING:
    from .tasks import Prompt
    from .turns import DecodedTurn

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


def score_turns(turns: Iterable["DecodedTurn"]) -> list["DecodedTurn"]:
    """Add a score to the turns with a known correct number."""
    return [
        turn
        if turn.prompt.expected is None
        else replace(turn, score=score_answer(turn.prompt.expected, turn.answer))
        for turn in turns
    ]


def summarize_scores(turns: Sequence["DecodedTurn"]) -> ScoreRecord | UnsetType:
    """Return ``score`` for an entry in results.json, or UNSET if nothing was scored."""
    scored = [(turn, turn.score) for turn in turns if turn.score is not None]
    if not scored:
        return UNSET
    passed = sum(score.passed for _, score in scored)
    return ScoreRecord(
        kind="accuracy",
        scored=len(scored),
        passed=passed,
        mean=passed / len(scored),
        ci95=wilson_interval(passed, len(scored)),
        cut=sum(turn.result.stop_reason != "eos" for turn, _ in scored),
    )


def check_scorable(benchmarks: Mapping[str, Sequence["Prompt"]]) -> None:
    """Raise UsageError if no prompt has a known correct answer."""
    if all(prompt.expected is None for prompts in benchmarks.values() for prompt in prompts):
        raise UsageError(
            f"--score: {', '.join(benchmarks)} cannot be scored; add gsm8k to --benchmarks, or "
            "leave it out (--save-answers writes programs for evalplus to run)"
        )


def save_answers(folder: Path, name: str, turns: Sequence["DecodedTurn"]) -> None:
    """Write the answers from one method and benchmark as JSON lines.

    evalplus reads ``task_id`` and ``solution``. The other fields have the names and places of
    lm-evaluation-harness's samples.

    Args:
        folder: folder for the answers, created if missing.
        name: file name, without its ending.
    """
    make_folder("--out", folder)
    lines = [
        json.dumps(
            {
                "task_id": turn.prompt.id,
                "solution": turn.answer,
                "turn": turn.turn,
                "doc_id": turn.conversation[1],
                "target": turn.prompt.reference,
                "resps": [[turn.answer]],
                "filtered_resps": [turn.answer],
            }
        )
        for turn in turns
    ]
    path = folder / (re.sub(r"[^\w.=,-]+", "_", name) + ".jsonl")
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
