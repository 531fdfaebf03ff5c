"""Who drafts and injects when: one file for each schedule, all on the same session verbs."""

from collections.abc import Callable
from typing import Any

from pipedraft.inference.schedules.autoregressive import autoregressive
from pipedraft.inference.schedules.spd import spd

SCHEDULES: dict[str, Callable[[Any], None]] = {"autoregressive": autoregressive, "spd": spd}
