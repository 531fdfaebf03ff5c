"""Who drafts and injects when: one file for each family, all on the same session verbs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pipedraft.inference.schedules.asynchronous import pipeinfer
from pipedraft.inference.schedules.autoregressive import autoregressive
from pipedraft.inference.schedules.flow import flowspec, pruned_pp
from pipedraft.inference.schedules.layered import layered, ppsd
from pipedraft.inference.schedules.rounds import eagle, naive_pp


@dataclass(frozen=True)
class Schedule:
    """A way to decode, and what it asks of a draft."""

    run: Callable[[Any], None]
    grows: Literal["layers", "trees", "micro_batches"] | None
    """Verb of the draft source; None: no draft."""
    expands: bool = False
    """Guesses join a tree that is on its way: not a chain, whatever the shape."""
    default_width: int = 1


SCHEDULES: dict[str, Schedule] = {
    "autoregressive": Schedule(autoregressive, None),
    "spd": Schedule(layered, "layers"),
    "pipedec": Schedule(layered, "layers", default_width=16),
    "ppsd": Schedule(ppsd, "layers"),
    "eagle": Schedule(eagle, "trees"),
    "naive_pp": Schedule(naive_pp, "trees"),
    "pruned_pp": Schedule(pruned_pp, "trees"),
    "flowspec": Schedule(flowspec, "trees", expands=True),
    "pipeinfer": Schedule(pipeinfer, "micro_batches"),
}
