"""Where draft tokens come from: the decode-time side of every draft."""

from collections.abc import Callable
from typing import Any

from pipedraft.inference.sources.base import DraftSource
from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.inference.sources.flexspec import FlexSpecSource
from pipedraft.inference.sources.language_model import LanguageModelSource
from pipedraft.inference.sources.ppsd import PPSDSource
from pipedraft.inference.sources.spd import SPDSource


def make_source(draft: Any, timing: str = "input_states") -> DraftSource:
    """The decode-time side of a loaded draft.

    Args:
        timing: of the schedule ``spd``; anything but the default is for a speculation module.
    """

    sources: dict[str, Callable[[Any], DraftSource]] = {
        "spd": SPDSource,
        "ppsd": PPSDSource,
        "eagle": EagleSource,
        "eagle3": EagleSource,
        "flexspec": FlexSpecSource,
        "language_model": LanguageModelSource,
    }
    if timing == "output_states":
        if draft.draft_type != "spd":
            raise ValueError(
                f"timing: {timing!r} needs a speculation module, which reads states of rows in "
                f"flight; this is a draft of type {draft.draft_type!r}; leave it out"
            )
        return SPDSource(draft, lead=1)
    return sources[draft.draft_type](draft)


def default_schedule(draft_type: str) -> str:
    """The schedule a draft was made for."""
    made_for = {"spd": "spd", "ppsd": "ppsd", "language_model": "pipeinfer"}
    return made_for.get(draft_type, "eagle")
