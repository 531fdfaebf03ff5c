"""Share of right answers, for benchmarks that have them.

Lossless decoding leaves the output, and so the score, as the target's own. Every method's own
answers are scored all the same: a method that changes them shows it.

Programs that a language model wrote run in a process that is short of everything. Limits against
accidents (endless loops, memory, forks, large files), and where the system permits namespaces a
file system of its own: read-only, without homes, /proc, network and other processes. The kernel is
the same, so this is no defense against a program that has a fault of it at hand. Without namespaces
a program may read and write whatever its user may. Linux only.
"""

import ast
import ctypes
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from msgspec import UNSET, UnsetType
from tqdm import tqdm

from pipedraft.eval.intervals import wilson_interval
from pipedraft.eval.record import ScoreRecord

if TYPE_CHECKING:
    from pipedraft.eval.arguments import ScoreOptions
    from pipedraft.eval.tasks import Prompt
    from pipedraft.eval.turns import DecodedTurn

CHILD = Path(__file__).with_name("sandbox_child.py")
PR_SET_DUMPABLE = 4
NOBODY = 65534
"""User that a program of root's runs as; no account of that number has to exist."""
PASSED = "passed"
TIME_LIMIT = "time limit"
CPU_LIMIT = "ended by SIGXCPU"

IMPORTS = (
    "import collections, datetime, decimal, hashlib, heapq, itertools, math, random, re, typing"
)
FORK = "import os\nif os.fork() == 0:\n    os._exit(0)"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    cpu_s: int = 3
    """The official harness allows 3 s of wall time; time on the CPU does not depend on the load."""
    wall_s: float = 30.0
    memory_bytes: int = 2**30
    """Address space."""
    file_bytes: int = 2**20
    """Largest file that it may write."""
    files: int = 64
    """Open at once."""
    disk_bytes: int = 2**24
    """All that it writes, where it is isolated."""


@cache
def isolation() -> tuple[str, ...]:
    """Command that starts another one with its own processes, network and mounts.

    Empty where the system forbids namespaces: the limits hold there too, but a program could use
    the network, read and write files, and reach into what its user runs.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    # Root makes namespaces of its own. Anybody else needs to be root of a user namespace for that;
    # not so root, whom the limit on processes would not bind in there.
    rights = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    command = (unshare, *rights, "--net", "--pid", "--mount", "--fork")
    tried = subprocess.run([*command, "true"], capture_output=True)
    return command if tried.returncode == 0 else ()


def _outcome(report: IO[bytes], token: str) -> str:
    """The last word of the script: a program may be ended after it has passed."""
    report.seek(0)
    for line in reversed(report.read().splitlines()):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and content.get("token") == token:
            return TIME_LIMIT if content["outcome"] == CPU_LIMIT else content["outcome"]
    return "ended early"


def run_program(
    sources: Sequence[str],
    limits: Limits | None = None,
    *,
    tests: Sequence[str] = (),
    entry_point: str = "",
) -> str:
    """Run source texts one after the other in one namespace, and then the tests in another process.

    The process has a session, and so a process group, of its own, an empty temporary folder, and
    of the environment PATH alone. It may start neither process nor thread. The group is killed at
    the end, whatever the end is.

    Args:
        tests: source texts, which define ``check(function)``; none: running is all.
        entry_point: name of the function in ``sources``; plain data goes in and comes out.

    Returns:
        "passed" if every text ran to its end and the tests passed; else "raises" and the name of
        the exception, "time limit", or how the process ended.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    job = {
        "sources": list(sources),
        "limits": asdict(limits),
        "tests": list(tests),
        "entry_point": entry_point,
        "user": NOBODY if os.geteuid() == 0 else None,
        "homes": sorted({str(Path.home().resolve()), "/root", "/home"}) if isolation() else None,
        "token": token,
    }
    with (
        tempfile.TemporaryDirectory(prefix="pipedraft-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as order,
        tempfile.TemporaryFile() as report,
    ):
        order.write(json.dumps(job).encode())
        order.seek(0)
        process = subprocess.Popen(
            [*isolation(), sys.executable, "-I", "-B", str(CHILD)],
            stdin=order,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            # OpenBLAS starts threads at its import, and gives up if it may not.
            env={"PATH": os.environ.get("PATH", os.defpath), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            in_time = _wait(process.pid, limits.wall_s)
        finally:
            # The leader is not reaped yet, so its number still stands for this group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _outcome(report, token) if in_time else TIME_LIMIT


def _wait(pid: int, timeout_s: float) -> bool:
    """True as soon as the process ended, without reaping it."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def check_sandbox(*, allow_unisolated: bool) -> None:
    """Raise ValueError unless programs can be run here, and be kept from starting others.

    Args:
        allow_unisolated: also where they could use the network and the user's files.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"--allow-code-execution: the sandbox needs Linux, not {sys.platform}; "
            "leave it out, or run the evaluation in a Linux container"
        )
    if not isolation() and not allow_unisolated:
        raise ValueError(
            "--allow-code-execution: the system does not permit `unshare --net --pid --mount`, so "
            "programs of the model could use the network and read and change your files; evaluate "
            "where it does, or accept that by --allow-unisolated-code"
        )
    if not isolation():
        # Other processes of this user, so the programs, may then not look into this one's memory.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    outcome = run_program([IMPORTS])
    if outcome != PASSED:
        raise ValueError(
            f"--allow-code-execution: {sys.executable} cannot run in the sandbox ({outcome}); "
            "as root without namespaces, install Python where every user may read it, or evaluate "
            "as another user"
        )
    if run_program([FORK]) != "raises BlockingIOError":
        raise ValueError(
            f"--allow-code-execution: the limit on processes does not bind user {os.geteuid()}; "
            "evaluate as another user"
        )


ACCURACY = "accuracy"
PASS_AT_1 = "pass@1"
NOT_ISOLATED = (
    "with the network, the user's files and other processes in reach (--allow-unisolated-code): "
    "the system does not permit `unshare --net --pid --mount`"
)
# A minus after a word, a number or a bracket is the operator.
NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]])-\\?\$?|\$-)?(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.\d+|\d+)"
)
MARK = "####"
"""Stands before the number at the end of a GSM8K solution."""
FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# Chen et al. 2021 (arXiv:2107.03374), section 2.1: a continued function ends before these.
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
INDENT = "    "
MAX_ANSWER, MAX_PARSES = 2**16, 50
"""Characters of an answer that are read, and attempts to find code between prose."""
THOUGHT_ENDS = "</think>"
"""Before it stand the thoughts of a reasoning model, with drafts of code in them."""


# -- what an answer says ---------------------------------------------------------------------------


@dataclass(frozen=True)
class NumberCheck:
    """An answer is right if it ends on this number."""

    expected: Decimal


@dataclass(frozen=True, kw_only=True)
class ProgramCheck:
    """An answer is right if the function in it passes the test."""

    prompt: str
    """The function's head, with imports and helpers; the answer may continue it or repeat it."""
    entry_point: str
    test: str
    """Defines check(function)."""


Check = NumberCheck | ProgramCheck


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return value.copy_negate() if match["minus"] else value


def find_number(answer: str) -> Decimal | None:
    """The number an answer ends on; None if it has none.

    In a last line with "####" it is the first number after that, else the last of all. Thousands
    separators and $ do not count, and equal values are equal: 1,250.50 is $1250.5.
    """
    text = answer.replace("\u2212", "-").replace("{,}", ",").rstrip()  # minus sign, LaTeX
    _, mark, result = text.rpartition("\n")[2].rpartition(MARK)
    marked = NUMBER.search(result) if mark else None
    if marked is not None:
        return _value(marked)
    found = list(NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _completes(source: str, name: str) -> bool:
    """True if the source compiles and the function has more to it than a docstring."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an answer's "\d" is nobody's concern
            tree = ast.parse(source)
            compile(tree, "<answer>", "exec")  # refuses a return outside a function, say
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    bodies = [
        node.body
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    return bool(bodies) and not all(
        isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in bodies[-1]
    )


def _without_prose(text: str, name: str, head: re.Match[str]) -> str:
    """The longest run of lines that holds the function and compiles."""
    lines = text.split("\n")
    line = text.count("\n", 0, head.start())
    begin = re.compile(r"(?:from|import|def|async|class)\b|@|[A-Z_]+ *=")
    num_left = MAX_PARSES
    for first in (i for i in range(line + 1) if begin.match(lines[i])):
        last = len(lines)
        while last > line + 1 and num_left:
            num_left -= 1
            code = "\n".join(lines[first:last])
            if _completes(code, name):
                return code
            # What ends later has the same error.
            last = min(last - 1, first + max(_error_line(code) - 1, 0))
    return text[head.start() :]


def _error_line(source: str) -> int:
    """Line, from 1, of the syntax error; a large number without one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "<answer>", "exec")
    except SyntaxError as error:
        return error.lineno or 1
    except (ValueError, RecursionError, MemoryError):
        return 1
    return sys.maxsize


def _continuations(text: str) -> Iterator[str]:
    """The text as it is, with the first line's indentation back, and with every line's."""
    yield text
    yield INDENT + text.lstrip()
    yield textwrap.indent(textwrap.dedent(text.strip("\n")), INDENT)


def _is_complete_head(prompt: str) -> bool:
    try:
        ast.parse(prompt)
    except SyntaxError:
        return False
    return True


def _as_module(prompt: str) -> str:
    """A prompt whose last function has a body."""
    return prompt + ("" if _is_complete_head(prompt) else INDENT + "pass\n")


def build_program(answer: str, check: ProgramCheck) -> list[str]:
    """Source texts that define the answer's function, to be run one after the other.

    The first code block with the whole function is taken, else the function in the plain text.
    An answer without it (a base model's, or a block with the body alone) continues the prompt. The
    prompt is run first in any case, as the official harness does: its imports and helpers are
    there even if the answer leaves them out.
    """
    answer = answer.rpartition(THOUGHT_ENDS)[2][:MAX_ANSWER]
    head = re.compile(rf"^(?:async +)?def +{re.escape(check.entry_point)}\b", re.MULTILINE)
    blocks = [textwrap.dedent(code) for code in FENCED.findall(answer) if code.strip()]
    wholes = [code for code in blocks if head.search(code)]
    plain = head.search(answer)
    code = wholes[0] if wholes else None
    if code is None and plain is not None:
        code = _without_prose(answer, check.entry_point, plain)
    if code is not None:
        return [_as_module(check.prompt), code]
    text = blocks[0] if blocks else answer
    if not blocks:
        ends = [end for stop in STOPS if (end := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
    prompt = check.prompt if check.prompt.endswith("\n") else check.prompt + "\n"
    programs = [prompt + continuation for continuation in _continuations(text)]
    complete = [program for program in programs if _completes(program, check.entry_point)]
    return [(complete or programs)[0]]


# -- scores ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """Score of one answer."""

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
        self, records: Sequence["DecodedTurn"], *, description: str = ""
    ) -> list["DecodedTurn"]:
        """Records with a score, for those that answer a prompt with a check."""
        scored = list(records)
        places = [i for i, record in enumerate(records) if self.can_score(record.prompt)]
        for i in tqdm(places, desc=description, unit="answer", disable=not places):
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
    tests = [_as_module(check.prompt), check.test]  # the prompt's helpers are the tests', too
    program = build_program(answer, check)
    outcome = run_program(program, tests=tests, entry_point=check.entry_point)
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
    if arguments.allow_unisolated_code and not allowed:
        raise ValueError(
            "--allow-unisolated-code: given without --allow-code-execution; add that, or leave it "
            "out"
        )
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
        check_sandbox(allow_unisolated=arguments.allow_unisolated_code)
        if not isolation():
            lines.append(f"{', '.join(coded)}: programs run {NOT_ISOLATED}")
    return Scorer(run_programs=allowed), lines
