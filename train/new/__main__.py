"""Write a recipe for one's own target, and print the commands that use it."""

import sys

from ...endings import leave_at_interrupts, leaving_at_interrupts, run_command
from ...errors import UsageError, make_folder

if __name__ == "__main__":
    leave_at_interrupts()

from ...data_recipes.config import Source
from ...data_recipes.regenerate import scan
from ...model_names import check_names
from .options import NewOptions


def main() -> None:
    options = NewOptions.read(sys.argv[1:])
    check_names({"target": options.target})
    source = Source(path=options.data)
    num_rows, _ = scan(source)
    if options.recipe.exists():
        default = " (the default)" if options.out is None else ""
        raise UsageError(
            f"--out: {str(options.recipe)!r}{default} exists; give another name, or remove it"
        )
    make_folder("--out", options.recipe.parent)
    with leaving_at_interrupts():  # torch and transformers
        from ...pretrained import quieten
        from .planning import plan_target
    quieten()
    for line in plan_target(options, source, num_rows):
        print(line, flush=True)


if __name__ == "__main__":
    run_command(main)
