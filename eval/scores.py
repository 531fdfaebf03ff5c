"""Score answers with GSM8K's accuracy, and write files for other harnesses.

Lossless decoding does not change the output, so every score is the target's own. Every method is
scored anyway, to expose a method that changes answers. Generated programs are not run here:
evalplus and lm-evaluation-harness score the files from ``save_answers``.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from ..errors import UsageError, make_folder
from ..files import write_atomically
from .answer import score_answer
from .intervals import wilson_interval
from .record import ScoreRecord

if TYPE_CHECKING:
    from .tasks import Prompt
    from .turns import DecodedTurn


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
