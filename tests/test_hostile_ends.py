"""Ends of commands under outside failures: full disks, closed pipes, Ctrl-C, odd messages."""

import errno
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from safetensors import SafetensorError
from tiny_models import REPOSITORY
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipedraft.endings import run_command
from pipedraft.errors import LINE_CHARACTERS, Failure, UsageError, blaming, one_line
from pipedraft.files import write_folder
from pipedraft.models.exchange.card import CardSource, render_card


def os_error(code: int, path: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path)


def wrapped(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    "error, status, text",
    [
        (UsageError("a.b: 1; give 2"), 2, "error: a.b: 1; give 2"),
        (Failure("server: gone"), 1, "error: server: gone"),
        (os_error(errno.ENOENT, "a\x1b[31m"), 2, r"'a\x1b[31m': No such file"),
        (os_error(errno.EISDIR, "a"), 2, "'a': Is a directory"),
        (os_error(errno.EACCES, "a"), 2, "'a': Permission denied"),
        (os_error(errno.ENAMETOOLONG, "a" * 5000), 2, "File name too long"),
        (os_error(errno.ENOSPC, "a"), 1, "'a': No space left on device; make room"),
        (os_error(errno.EROFS, "a"), 1, "'a': Read-only file system"),
        (os_error(errno.EIO), 1, "output: Input/output error"),
        (os_error(errno.EMFILE, "a"), 1, "Too many open files"),
        (os_error(errno.EPIPE), 1, "output: its reader has closed it"),
        (wrapped(RuntimeError("of a library"), os_error(errno.ENOSPC, "a")), 1, "'a': No space"),
        (wrapped(UsageError("--out: no"), os_error(errno.ENOSPC, "a")), 1, "error: --out: no"),
        (SafetensorError("IoError: no space"), 1, "error: IoError: no space"),
        (Exception("No space (os error 28)"), 1, "(os error 28); make room"),  # tokenizers'
        (MemoryError(), 1, "memory: not enough"),
        (ModuleNotFoundError("no", name="peft.tuners"), 2, f"{REPOSITORY}[peft]'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 2, "not UTF-8"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 1, "refused"),
        (RuntimeError("Symlink loop from 'a'"), 2, "'a': a link that leads back to itself"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_every_end_is_one_line_and_its_status(error, status, text, capsys):
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    said = capsys.readouterr().err
    assert ended.value.code == status
    assert text in said and said.count("\n") == 1 and said[:-1].isprintable()


CLOSED = """
import os, sys
from pipedraft.endings import run_command
run_command(lambda: print(len(os.listdir("/proc/self/fd")) and open("/dev/zero").fileno()))
"""


def test_closed_standard_files_are_told_or_replaced():
    line = [sys.executable, "-c", CLOSED]
    done = subprocess.run(["bash", "-c", '"$@" <&- ', "-", *line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and int(done.stdout) > 2
    done = subprocess.run(["bash", "-c", '"$@" >&- ', "-", *line], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: output: standard output is closed; send it to a file")


def test_links_that_lead_nowhere_are_named(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    for name, where in (("loop", "loop"), ("gone", "nowhere")):
        path = str(tmp_path / name)

        def fail(path: str = path) -> None:
            raise UsageError(f"--target: no folder {path + '/x'!r}; give one")

        with pytest.raises(SystemExit):
            run_command(fail)
        assert f"; {path!r} is a link to '{where}', which leads now" in capsys.readouterr().err
    with pytest.raises(UsageError, match=f"--out: '{tmp_path}/loop' is a link that leads back to"):
        write_folder(tmp_path / "loop", lambda folder: None)


def test_an_error_names_the_option_that_was_given():
    with pytest.raises(ValueError, match="^--draft-model: no folder 'x'"), blaming("--draft-model"):
        raise ValueError("target: no folder 'x'")
    with pytest.raises(ValueError, match="^dtype: 'x'"), blaming("--draft-model"):
        raise ValueError("dtype: 'x'")


def test_what_torchrun_says_of_a_refusal_ends_with_its_line(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    def fail() -> None:
        raise UsageError("a.b: 1; give 2")

    with pytest.raises(SystemExit):
        run_command(fail)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    assert "traceback : error: a.b: 1; give 2\n===" in str(ChildFailedError("x", {0: failure}))


def test_a_fault_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: print(1 // 0))


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\nb\t c", "a b c"),
        ("\x1b[2J\x07\u202e", r"\x1b[2J\x07\u202e"),
        ("half \udc80", r"half \udc80"),
        ("http://user:secret@host/x", "http://***@host/x"),
        ("https://secret@host:1/x@y", "https://***@host:1/x@y"),
        ("naive caf\u00e9 \u4e2d", "naive caf\u00e9 \u4e2d"),
    ],
)
def test_messages_cannot_act_on_a_terminal_nor_show_a_password(text, shown):
    assert one_line(text) == shown
    assert len(one_line(text * 10_000)) <= LINE_CHARACTERS + 5


def test_a_cause_that_is_raised_again_is_its_own_and_ends(capsys):
    """A library may wrap a refusal: the user should see the refusal itself."""

    def fail() -> None:
        try:
            raise RuntimeError("of a library") from UsageError("a.b: 1; give 2")
        except RuntimeError as error:
            raise error.__cause__ from None  # type: ignore[misc]

    with pytest.raises(SystemExit):
        run_command(fail)
    assert capsys.readouterr().err == "error: a.b: 1; give 2\n"


START = "import sys; from pipedraft.endings import run_command; run_command(lambda: {})"


def shell(line: str, body: str) -> tuple[int, str]:
    """Status and standard error for a small command under a shell redirection."""
    command = line.replace("COMMAND", f"{sys.executable} -c '{START.format(body)}'")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "line, body, status, text",
    [
        ("COMMAND > /dev/full", "print(1)", 1, "output: No space left on device"),
        ("COMMAND > /dev/full", "(print(1), sys.exit(0))", 1, "No space left"),
        ("set -o pipefail; COMMAND | true", "print(str(1) * 10**6)", 1, "reader has closed it"),
    ],
)
def test_a_full_output_and_a_reader_that_left_are_one_line(line, body, status, text):
    ended, said = shell(line, body)
    assert (ended, said.count("\n")) == (status, bool(text)) and text in said


LOADING = """
import runpy, sys, time
class FirstLibrary:
    def find_spec(name, *_):
        if name in ("datasets", "torch"):
            print("up", flush=True)
            time.sleep(999)  # a machine may be slow, and another one fast
sys.meta_path.insert(0, FirstLibrary)
sys.argv += ["--config", "configs/spd/tiny.yaml"]
runpy.run_module('{}', run_name='__main__')
"""
RANKS = """
import sys
from pipedraft.inference.ranks.launch import run_ranks
program = "import os, time; os.environ['RANK'] == '1' and print('up', flush=True); time.sleep(999)"
run_ranks(2, [sys.executable, "-c", program])
"""


@pytest.mark.parametrize(
    "program",
    [RANKS, LOADING.format("pipedraft.train")],
    ids=["ranks", "train"],
)
def test_ctrl_c_ends_a_command_at_once_and_in_one_line(program):
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert (process.returncode, said) == (130, "error: interrupted\n")


GENTLE = """
import sys
from pipedraft.inference.ranks.launch import run_ranks
program = "import signal; print('up' + chr(10), end='', flush=True); "
program += "signal.sigwait({15}); signal.sigwait({2})"
run_ranks(2, [sys.executable, "-c", program], passes_signals=True)
"""


@pytest.mark.parametrize(("second", "status"), [(signal.SIGINT, 0), (signal.SIGHUP, 129)])
def test_ranks_may_end_what_they_have_begun(second, status):
    """Ranks handle two signals; others, as from a closed terminal, end them at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", GENTLE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    for number in (signal.SIGTERM, second):
        process.send_signal(number)
        time.sleep(0.2)
    _, said = process.communicate(timeout=100)
    assert process.returncode == status and said.count("\n") == bool(status)


def test_every_command_can_be_interrupted_while_it_loads():
    """Slow imports come after ``leave_at_interrupts``."""
    commands = set()
    for path in REPOSITORY.rglob("*.py"):
        if {".venv", "out", "tests", "endings.py"} & {*path.relative_to(REPOSITORY).parts}:
            continue
        text = path.read_text()
        if re.search(r"^ +run_command\(", text, re.M):
            before = text.partition("    leave_at_interrupts()\n")[0]
            imported = re.findall(r"^(?:from|import) ([\w.]+)", before, re.M)
            slow = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
            # Training's help is a text without any library.
            names = {name.rpartition(".")[2] for name in slow}
            assert names - {"help", "errors", "options"} == {"endings"}, path
            commands.add(path.parent.name)
    assert {"train", "eval", "inference", "models", "data_recipes"} <= commands


def test_a_card_shows_what_others_wrote_and_nothing_of_it_acts(monkeypatch):
    evil = "</x><script>alert(1)</script>`|[a](javascript:1)\x1b[31m\nb"
    license_of = lambda *_, **__: {"license": evil}  # noqa: E731
    monkeypatch.setattr("pipedraft.models.exchange.card.license_of", license_of)
    card = render_card(
        CardSource(
            description={
                "draft_type": "eagle3",
                "architecture": {},
                "layer": {},
                "target": {"name": f"/home/me/{evil}", "fingerprint": {"hash": evil}},
                "training": {
                    "data": {
                        "sources": {f"/home/me/{evil}": {"rows_kept": 1, "tokens": 2}},
                        "supervised_tokens": 1,
                        "tokens": 2,
                        "licenses": {evil: 1},
                    }
                },
            },
        )
    )
    head, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(head)["tags"]
    assert "<script" not in body and "](javascript" not in body and "/home/me" not in body
    assert all(c.isprintable() or c == "\n" for c in card)
