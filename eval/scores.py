"""Share of right answers, for benchmarks that have them.

Lossless decoding leaves the text, and so the score, as the target's own. Every method's own texts
are scored all the same: a method that changes them shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from tqdm import tqdm

from pipedraft.eval.answers import Check, NumberCheck, ProgramCheck, build_program, find_number
from pipedraft.eval.intervals import wilson_interval
from pipedraft.eval.record import ScoreRecord
from pipedraft.eval.sandbox import PASSED, check_sandbox, isolation, run_program

if TYPE_CHECKING:
    from pipedraft.eval.arguments import ScoreOptions
    from pipedraft.eval.run import DecodedTurn
    from pipedraft.eval.tasks import Prompt

ACCURACY = "accuracy"
PASS_AT_1 = "pass@1"
NOT_ISOLATED = (
    "with the network in reach, and the user's other processes: the system does not permit "
    "`unshare --net --pid`"
)


@dataclass(frozen=True)
class Score:
    """Of one answer."""

    passed: bool
    outcome: str
    """PASSED, or what was wrong with it."""
    kind: str
    """``ACCURACY`` or ``PASS_AT_1``."""


class Scorer:
    """Scores answers, each different one once."""

    def __init__(self, *, run_programs: bool) -> None:
        self.run_programs = run_programs
        self._scores: dict[tuple[Check, str], Score] = {}

    def can_score(self, prompt: "Prompt") -> bool:
        runs = self.run_programs or not isinstance(prompt.check, ProgramCheck)
        return prompt.check is not None and runs

    def score(self, check: Check, answer: str) -> Score:
        if (check, answer) not in self._scores:
            self._scores[check, answer] = (
                _score_number(check, answer)
                if isinstance(check, NumberCheck)
                else _score_program(check, answer)
            )
        return self._scores[check, answer]

    def score_records(
        self, records: Sequence["DecodedTurn"], *, description: str = "", progress: bool = True
    ) -> list["DecodedTurn"]:
        """The same records; those that answer a prompt with a check carry its score."""
        scored = list(records)
        places = [i for i, record in enumerate(records) if self.can_score(record.prompt)]
        for i in tqdm(places, desc=description, unit="answer", disable=not (progress and places)):
            check = records[i].prompt.check
            assert check is not None and len(records[i].prompt.turns) == 1
            scored[i] = replace(records[i], score=self.score(check, records[i].answer))
        return scored


def _score_number(check: NumberCheck, answer: str) -> Score:
    number = find_number(answer)
    if number is None:
        return Score(False, "no number", ACCURACY)
    right = number == check.expected
    return Score(right, PASSED if right else f"{number} for {check.expected}", ACCURACY)


def _score_program(check: ProgramCheck, answer: str) -> Score:
    outcome = run_program(
        [*build_program(answer, check), check.test, f"check({check.entry_point})"]
    )
    return Score(outcome == PASSED, outcome, PASS_AT_1)


def summarize_scores(records: Sequence["DecodedTurn"]) -> ScoreRecord | UnsetType:
    """``score`` of an entry of results.json; unset if nothing was scored."""
    scored = [(record, record.score) for record in records if record.score is not None]
    if not scored:
        return UNSET
    passed = sum(score.passed for _, score in scored)
    kind = scored[0][1].kind
    return ScoreRecord(
        kind=kind,
        scored=len(scored),
        passed=passed,
        mean=passed / len(scored),
        ci95=wilson_interval(passed, len(scored)),
        cut=sum(record.result.stop_reason != "eos" for record, _ in scored),
        isolated=bool(isolation()) if kind == PASS_AT_1 else None,
    )


def make_scorer(
    arguments: "ScoreOptions", benchmarks: Mapping[str, Sequence["Prompt"]]
) -> tuple[Scorer | None, list[str]]:
    """The scorer that the options ask for, and lines for the user."""
    allowed = arguments.allow_code_execution
    if not arguments.score:
        if allowed:
            raise ValueError(
                "--allow-code-execution: given without --score; add --score, or leave it out"
            )
        return None, []
    kinds = {name: {type(prompt.check) for prompt in ps} for name, ps in benchmarks.items()}
    coded = [name for name, types in kinds.items() if ProgramCheck in types]
    if not coded and not any(NumberCheck in types for types in kinds.values()):
        raise ValueError(
            f"--score: {', '.join(benchmarks)} cannot be scored; "
            "add gsm8k or humaneval to --benchmarks, or leave it out"
        )
    if allowed and not coded:
        raise ValueError(
            f"--allow-code-execution: {', '.join(benchmarks)} asks for no programs; "
            "add humaneval to --benchmarks, or leave it out"
        )
    lines = []
    if coded and not allowed:
        lines.append(
            f"{', '.join(coded)} is not scored: its answers are programs; add "
            "--allow-code-execution to run them in a sandbox"
        )
    if allowed:
        check_sandbox()
        if not isolation():
            lines.append(f"{', '.join(coded)}: programs run {NOT_ISOLATED}")
    return Scorer(run_programs=allowed), lines
