"""Programs that a model wrote to cheat or to break out, and answers that are slow to read."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from pipedraft.eval import scores
from pipedraft.eval.scores import (
    MAX_PARSES,
    Limits,
    ProgramCheck,
    build_program,
    check_sandbox,
    isolation,
    make_scorer,
    run_program,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
LIMITS = Limits(cpu_s=1, wall_s=100, disk_bytes=2**21)
TESTS = [
    "def helper(x):\n    return x + 1\n",
    "def check(f):\n"
    "    assert f(2) == 4 and helper(1) == 2\n"
    "    assert f((1, 2)) == (1, 2, 1, 2) and f([1.5]) == [1.5, 1.5]\n"
    "    assert f({'a': {1, 2}}) == [{'a': {1, 2}}, None, True]\n",
]
RIGHT = "def f(x):\n    return [x, None, True] if isinstance(x, dict) else x * 2\n"


@linux
@pytest.mark.parametrize(
    "program, outcome",
    [
        (RIGHT, "passed"),
        (RIGHT.replace("2", "3"), "raises AssertionError"),
        ("def f(x): raise KeyError(x)", "raises KeyError"),
        ("def f(x): return f", "raises TypeError"),
        ("g = 1", "raises KeyError"),
        ("import sys\ndef f(x): sys.exit(0)", "raises SystemExit"),
        ("import os\ndef f(x): os._exit(0)", "ended early"),
        ("def f(x): return 'a' * 2**21", "raises ValueError"),
        ("def f(x):\n    while True: pass", "time limit"),
        # What would have passed where tests and program share a process:
        ("class Yes(int):\n    def __eq__(self, other): return True\n"
         "def f(x): return Yes(7)", "raises AssertionError"),
        ("import builtins\nbuiltins.AssertionError = Exception\nimport sys\n"
         "sys.settrace(lambda *_: None)\ndef f(x): return 0", "raises AssertionError"),
        ("import sys, json\nframe = sys._getframe()\n"
         "while frame: frame.f_globals['judge'] = frame.f_globals['json'] = None; "
         "frame = frame.f_back\ndef f(x): return 0", "ended early"),
        ("import os\nfor k in range(3, 64):\n    try: os.write(k, b'{\"value\": null}\\n' * 9)\n"
         "    except OSError: pass\ndef f(x): return 0", "raises AssertionError"),
        ("import os\nfor k in range(3, 64):\n    try: os.write(k, b'[' * 10**5 + b'\\n')\n"
         "    except OSError: pass\ndef f(x): return 0", "raises RecursionError"),
        ("import os, signal\ntry: os.kill(os.getppid(), signal.SIGTERM)\nexcept OSError: pass\n"
         "def f(x): return 0", "raises AssertionError"),
    ],
)  # fmt: skip
def test_a_program_passes_by_what_its_function_returns_and_by_nothing_else(program, outcome):
    assert run_program([program], LIMITS, tests=TESTS, entry_point="f") == outcome


@linux
@pytest.mark.parametrize(
    "program",
    [
        "assert os.listdir('/proc') == []",
        f"assert not os.path.exists({os.path.expanduser('~/.cache')!r})",
        "assert set(os.listdir('/root')) <= {'.pyenv', '.local', '.venv'}",
        "assert os.listdir() == [] and set(os.environ) <= {'PATH', 'OMP_NUM_THREADS', 'LC_CTYPE'}",
        "refused(open, '/tmp/x', 'w')",
        "refused(open, '/dev/shm/x', 'w')",
        "refused(open, '/etc/shadow')",
        "refused(os.kill, -1, 9)",
        "refused(os.setuid, 0)",
        "refused(ctypes.CDLL(None).mount, b'x', b'/tmp', b'tmpfs', 0, None)",
        "refused(lambda: [open(str(i), 'wb').write(bytes(2**19)) for i in range(9)])",
        "refused(os.open, f'/proc/{os.getppid()}/mem', os.O_RDWR)",
    ],
)
def test_a_program_reaches_nothing_but_its_own_small_folder(program):
    if not isolation():
        pytest.skip("the system does not permit namespaces")
    source = (
        "import ctypes, os\n"
        "def refused(call, *words):\n"
        "    try: assert call(*words) == -1, 'it was allowed'\n"
        "    except OSError: pass\n"
    )
    assert run_program([source + program], LIMITS) == "passed"


def options(**given):
    names = ("score", "allow_code_execution", "allow_unisolated_code")
    return SimpleNamespace(**{**dict.fromkeys(names, False), **given})


def test_nothing_runs_where_it_cannot_be_isolated_unless_the_risk_is_accepted(monkeypatch):
    check = ProgramCheck(prompt="def f(x):\n", entry_point="f", test=TESTS[1])
    tasks = {"humaneval": [SimpleNamespace(check=check)]}
    monkeypatch.setattr(scores.sys, "platform", "linux")
    monkeypatch.setattr(scores, "isolation", tuple)
    monkeypatch.setattr("pipedraft.eval.scores.isolation", tuple)
    monkeypatch.setattr(scores, "run_program", lambda sources: pytest.fail("it ran"))
    given = {"score": True, "allow_code_execution": True}
    with pytest.raises(ValueError, match="read and change your files.*--allow-unisolated-code"):
        make_scorer(options(**given), tasks)
    outcomes = ["passed", "raises BlockingIOError"]
    monkeypatch.setattr(scores, "run_program", lambda sources: outcomes.pop(0))
    monkeypatch.setattr(scores.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    _, lines = make_scorer(options(**given, allow_unisolated_code=True), tasks)
    assert "files and other processes in reach" in lines[0]
    with pytest.raises(ValueError, match="^--allow-unisolated-code: given without"):
        make_scorer(options(allow_unisolated_code=True), tasks)
    assert check_sandbox is scores.check_sandbox


@pytest.mark.parametrize("num_lines", [100, 800, 6400])
def test_an_answer_is_read_in_linear_time(num_lines, monkeypatch):
    """Prose that looks like code: 400 lines of it took 14 s, 800 no end."""
    parses = []
    real = compile
    monkeypatch.setattr(
        "pipedraft.eval.scores.compile", lambda *a: parses.append(0) or real(*a), raising=False
    )
    check = ProgramCheck(prompt="def f(x):\n", entry_point="f", test="")
    prose = "import this and\nA = 1\nasync what\n" * (num_lines // 3)
    started = time.process_time()
    build_program(prose + "def f(x):\n    return 1\n" + prose, check)
    assert len(parses) <= 2 * MAX_PARSES + 4
    assert time.process_time() - started < 5
