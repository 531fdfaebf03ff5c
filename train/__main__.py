"""Train a draft head. See `accelerate launch -m pipedraft.train --help`.

Exit status:
    0: the run is done, or max_minutes or evaluation.patience ended it.
    1: a failure, such as a NaN or infinite loss, or an answer that --overfit-one cannot learn.
    2: bad input.
    130, 143: SIGINT (Ctrl-C) or SIGTERM. The run finishes and saves the current step first.

The launchers accelerate and torchrun report their own status 1 instead.
"""

import math
import os
import sys
from itertools import chain
from pathlib import Path

from ..endings import leave_at_interrupts, leaving_at_interrupts, run_command
from .help import EXAMPLE, answer_early

if __name__ == "__main__":
    leave_at_interrupts()
    answer_early(sys.argv[1:])

from ..data_recipes.sources import list_files
from ..errors import UsageError
from ..model_names import check_names
from .config import parse_run
from .methods import methods


def take_plan(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without ``--plan``, and True if it was among them.

    ``--plan FILE`` becomes ``--config FILE``.
    """
    split = [word.split("=", 1) if word.startswith("--plan=") else [word] for word in arguments]
    arguments = [part for parts in split for part in parts]
    if "--plan" not in arguments:
        return arguments, False
    at = arguments.index("--plan")
    has_file = at + 1 < len(arguments) and not arguments[at + 1].startswith("-")
    return [*arguments[:at], *(["--config"] if has_file else []), *arguments[at + 1 :]], True


OVERFIT_STEPS = 400
"""Steps of --overfit-one without a number: enough for every head on the embedded target."""


def take_flag(
    arguments: list[str], flag: str, default: str | None = None
) -> tuple[list[str], str | None]:
    """Return the arguments without ``flag`` and its value, and the value; None: not among them.

    Args:
        default: the value if the flag has none; None: it must have one.
    """
    given = [word.partition("=") for word in arguments]
    at = next((i for i, (name, *_) in enumerate(given) if name.replace("_", "-") == flag), None)
    if at is None:
        return arguments, None
    (_, equals, value), rest = given[at], arguments[at + 1 :]
    if not equals and rest and not rest[0].startswith("--"):
        value, *rest = rest
    elif not equals:
        value = default or ""
    if default is None and not value:
        raise UsageError(f"{flag}: no value; give one, see --help")
    return [*arguments[:at], *rest], value


def take_overfit(arguments: list[str]) -> tuple[list[str], int | None]:
    """Return the arguments without ``--overfit-one [N]``, and its number of steps or None."""
    flag = "--overfit-one"
    arguments, value = take_flag(arguments, flag, str(OVERFIT_STEPS))
    if value is None:
        return arguments, None
    if not value.isdecimal() or not int(value):
        raise UsageError(
            f"{flag}: {value!r} is no number of steps; give one from 1 on or leave it out, and "
            "name the configuration with --config FILE"
        )
    return arguments, int(value)


def take_wish(arguments: list[str]) -> tuple[list[str], float | None, Path | None]:
    """Return the arguments without ``--wish-tau`` and ``--curve``, and their values or None."""
    arguments, given = take_flag(arguments, "--wish-tau")
    arguments, folder = take_flag(arguments, "--curve")
    if given is None and folder is not None:
        raise UsageError(f"--curve: {folder!r} without --wish-tau; give the wished tau")
    if given is None:
        return arguments, None, None
    try:
        length = float(given)
    except ValueError:
        length = 0.0
    if not 1 < length < math.inf:
        raise UsageError(f"--wish-tau: {given!r} is no acceptance length; give one above 1")
    return arguments, length, None if folder is None else Path(folder)


def main() -> None:
    arguments, wants_plan = take_plan(sys.argv[1:])
    arguments, overfit_steps = take_overfit(arguments)
    arguments, wished_tau, folder = take_wish(arguments)
    if wants_plan and overfit_steps is not None:
        raise UsageError("--overfit-one: with --plan, which trains nothing; leave one of them out")
    if wished_tau is not None and not wants_plan:
        raise UsageError("--wish-tau: without --plan, which reads it; give --plan FILE")
    run, model, resolved = parse_run(arguments, methods(), EXAMPLE)
    check_names({"target": run.target})
    for source in run.data.sources:
        list_files(source)
    with leaving_at_interrupts():  # torch and transformers
        from ..pretrained import quieten
        from .overfit import run_gate
        from .plan import Plan
        from .run import registry, run_training
        from .wish import Wish
    quieten()
    if wants_plan:
        wish = None if wished_tau is None else Wish(wished_tau, folder)
        plan = Plan(run, model, registry()[run.method]).lines()
        for line in chain(plan, wish.lines(run) if wish else ()):
            print(line, flush=True)
        return
    if overfit_steps is not None:
        print(run_gate(run, model, overfit_steps), flush=True)
        return
    run_training(run, model, resolved)


if __name__ == "__main__":
    # Unset, tokenizers warns and turns its threads off after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    run_command(main)
