"""Shell completion: the printed script, in the shell that it is for."""

import importlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
from fork_server import forked, status_of

from pipedraft import completion
from pipedraft.__main__ import COMMANDS
from pipedraft.errors import run_command

COMPLETE = r"""
source "$1"
read -ra COMP_WORDS <<< "$2"
[[ "$2" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$2 COMP_POINT=${#2}
_shtab_pipedraft
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """The scripts as the command prints them."""
    folder = tmp_path_factory.mktemp("completion")

    def print_both() -> None:
        completion.whole_parser = cache(completion.whole_parser)
        for shell in ("bash", "zsh"):
            sys.argv = ["completion", shell]
            with (folder / shell).open("w") as file, redirect_stdout(file):
                completion.main()

    assert status_of(forked(print_both)) == 0
    return folder


@pytest.mark.all
def test_a_process_of_its_own_prints_the_same(scripts):
    command = [sys.executable, "-m", "pipedraft", "completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (scripts / "bash").read_text()


def completed(scripts: Path, line: str, cwd: Path | None = None) -> set[str]:
    """What bash offers for the last word of a line."""
    command = ["bash", "--norc", "-c", COMPLETE, "bash", str(scripts / "bash"), line]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_and_subcommands(scripts):
    assert completed(scripts, "pipedraft ") >= set(COMMANDS)
    assert completed(scripts, "pipedraft do") == {"doctor"}
    assert completed(scripts, "pipedraft models ") >= {"push", "export"}
    assert completed(scripts, "pipedraft eval c") == {"compare"}
    assert completed(scripts, "pipedraft completion ") == {"bash", "zsh"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pipedraft models push --re", {"--repo", "--results", "--revision"}),
        ("pipedraft doctor --", {"--help", "--config", "--print_config", "--json", "--assets"}),
        (
            "pipedraft eval --max",
            {"--max-new-tokens", "--max-in-flight", "--max-segment-rows", "--max-length"}
            | {"--max-expansion-rows"},
        ),
        ("pipedraft inference --check", {"--checkpoint"}),
        ("pipedraft train --optim.l", {"--optim.lr"}),
        ("pipedraft train --model.num_stag", {"--model.num_stages"}),
        ("pipedraft train --model.fc_", {"--model.fc_bias", "--model.fc_norm"}),
        ("pipedraft data --data.max_l", {"--data.max_length"}),
        ("pipedraft eval compare --j", {"--json"}),
    ],
)
def test_bash_completes_the_options_of_each_command(line, expected, scripts):
    assert completed(scripts, line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pipedraft models export --format s", {"sglang", "speculators"}),
        ("pipedraft inference --backend p", {"process"}),
        ("pipedraft train --optim.name ", {"adamw", "muon"}),
        ("pipedraft train --packing ", {"true", "false"}),
    ],
)
def test_bash_completes_the_values_of_an_option(line, expected, scripts):
    assert completed(scripts, line) == expected


def test_bash_completes_files_where_an_option_takes_one(scripts, tmp_path):
    (tmp_path / "spd_quick.yaml").touch()
    (tmp_path / "spd_run").mkdir()
    files = {"spd_quick.yaml", "spd_run"}
    assert completed(scripts, "pipedraft train --config sp", tmp_path) == files
    assert completed(scripts, "pipedraft inference --checkpoint spd_r", tmp_path) == {"spd_run"}
    assert completed(scripts, "pipedraft inference --seed sp", tmp_path) == set()


ZSH_START = "cp {0}/zsh _pipedraft; fpath+=($PWD); autoload -U compinit; compinit -u -D"
SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], "bind 'set bell-style none'; source {0}/bash"),
    "zsh": (["-f", "-i"], ZSH_START),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_in_an_interactive_shell_completes_the_word(shell, scripts, tmp_path):
    """The shell's own line editor on a pseudo-terminal; nothing of Python is in its PATH."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} to type in")
    options, start = SHELLS[shell]
    environment = {"PATH": "/usr/bin:/bin", "TERM": "dumb", "PS1": "> ", "HOME": str(tmp_path)}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execve(program, [shell, *options], environment)
    try:
        for typed, expected in (
            (start.format(scripts) + "; echo rea''dy\r", "\nready"),
            ("pipedraft mod\t", "models "),
            ("pu\t", "push "),
            ("--resu\t", "--results "),
        ):
            os.write(terminal, typed.encode())
            seen, deadline = "", time.monotonic() + 300
            while expected not in seen and time.monotonic() < deadline:
                if select.select([terminal], [], [], 0.1)[0]:
                    text = os.read(terminal, 4096).decode(errors="replace")
                    seen += re.sub(r"\x1b\[[?\d;]*\w|\x07|\r", "", text)
            assert expected in seen
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def test_zsh_reads_its_script(scripts):
    text = (scripts / "zsh").read_text()
    assert text.startswith("#compdef pipedraft")
    for option in ("--model.num_stages", "--commit-message", "--assets"):
        assert option in text


def test_without_the_library_one_line_says_what_to_install(tmp_path):
    (tmp_path / "shtab.py").write_text("raise ImportError('hidden')")
    command = [sys.executable, "-m", "pipedraft", "completion", "bash"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: shtab: not installed") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "completion"])
def test_help_has_an_example_and_a_bad_option_is_one_line(command, monkeypatch, capfd):
    module = importlib.import_module(f"pipedraft.{command}")
    for words, status in ((["--help"], 0), (["--jsn"], 2)):
        monkeypatch.setattr(sys, "argv", [command, *words])
        with pytest.raises(SystemExit) as stop:
            run_command(module.main)
        assert stop.value.code == status
        out, err = capfd.readouterr()
        if status:
            assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
        else:
            assert f"  pipedraft {command}" in out and err == ""


def test_unknown_shells_are_refused_before_anything_is_loaded():
    command = [sys.executable, "-X", "importtime", "-m", "pipedraft", "completion", "fish"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2 and "'fish'" in done.stderr.splitlines()[-1]
    assert "torch" not in done.stderr
