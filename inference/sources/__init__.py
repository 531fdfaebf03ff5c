"""Draft sources, which run each type of draft at decode time."""

from collections.abc import Callable
from typing import Any

from .base import DraftSource
from .dflash import DFlashSource
from .dspark import DSparkSource
from .eagle import EagleSource
from .flexspec import FlexSpecSource
from .language_model import language_model_source
from .lookup import LookupSource
from .ppsd import PPSDSource
from .spd import SPDSource


def make_source(draft: Any, timing: str = "input_states", tokens_per_step: int = 1) -> DraftSource:
    """Build the source for a loaded draft. Only schedule ``spd`` sets the other arguments."""
    sources: dict[str, Callable[[Any], DraftSource]] = {
        "ppsd": PPSDSource,
        "eagle": EagleSource,
        "eagle3": EagleSource,
        "mtp": EagleSource,
        "dflash": DFlashSource,
        "dspark": DSparkSource,
        "flexspec": FlexSpecSource,
        "language_model": language_model_source,
        "ngram": LookupSource,
        "suffix": LookupSource,
    }
    if draft.draft_type == "spd":
        # The other mismatch is fine: a head for input states may read later ones (lead=1).
        if timing == "input_states" != draft.config.timing:
            raise ValueError(
                f"timing: {timing!r}, but this module was trained for output states, which do not "
                "exist before a step; give --schedule spd --timing output_states"
            )
        if tokens_per_step != draft.config.tokens_per_step:
            raise ValueError(
                f"tokens_per_step: {tokens_per_step}, but this module was trained for "
                f"{draft.config.tokens_per_step}; give --schedule spd --tokens-per-step "
                f"{draft.config.tokens_per_step}"
            )
        return SPDSource(draft, lead=int(timing != draft.config.timing))
    if timing == "output_states":
        raise ValueError(
            f"timing: {timing!r} needs a speculation module, which reads states of rows in "
            f"flight; this is a draft of type {draft.draft_type!r}; leave it out"
        )
    return sources[draft.draft_type](draft)


def default_schedule(draft_type: str) -> str:
    """Return the schedule a draft was designed for."""
    made_for = {"spd": "spd", "ppsd": "ppsd", "language_model": "pipeinfer"}
    return made_for.get(draft_type, "eagle")
